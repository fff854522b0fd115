# Runs a script as Slurm's batch step does. $1: output, $2: errors; then the script's arguments.
# An output of "-" stays where it is. The script itself is in SBATCH_SCRIPT.
SLURM_JOB_ID=$(printf %s "${SHOAL_JOB_ID#j}" | tr . _)
SLURM_JOBID=$SLURM_JOB_ID
SLURMD_NODENAME=$SHOAL_NODE SLURM_RESTART_COUNT=$((SHOAL_ATTEMPT - 1))
SLURM_JOB_NODELIST=$(printf %s "${SHOAL_HOSTS:-$SHOAL_NODE:1}" | sed 's/:[0-9]*//g')
SLURM_NODELIST=$SLURM_JOB_NODELIST SLURM_JOB_GPUS=$SHOAL_GPUS
SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_ID=4294967291
export SLURM_JOB_ID SLURM_JOBID SLURMD_NODENAME SLURM_RESTART_COUNT SLURM_JOB_NODELIST
export SLURM_NODELIST SLURM_JOB_GPUS SLURM_NODEID SLURM_PROCID SLURM_LOCALID SLURM_STEP_ID
if [ -n "${SHOAL_ARRAY_JOB:-}" ]; then
    export SLURM_ARRAY_JOB_ID="${SHOAL_ARRAY_JOB#j}" SLURM_ARRAY_TASK_ID="$SHOAL_ARRAY_INDEX"
    export SLURM_ARRAY_TASK_COUNT="$SHOAL_ARRAY_COUNT"
fi
named() {
    printf %s "$1" | sed "s/%j/$SLURM_JOB_ID/g; s/%A/${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}/g
        s/%a/${SLURM_ARRAY_TASK_ID:-4294967294}/g; s/%N/$SLURMD_NODENAME/g; s/%n/0/g; s/%t/0/g; s/%s/batch/g"
}
out=$(named "$1") err=$(named "$2")
if [ "$out" = - ]; then
    :
elif : >>"$out" && : >>"${err:-$out}"; then
    echo "output: $out${err:+, errors: $err}"
    exec >"$out" 2>&1
    if [ -n "$err" ]; then exec 2>"$err"; fi
else
    echo "the output stays here: $out cannot be written on $SHOAL_NODE"
fi
shift 2
script=$(mktemp "${SHOAL_SCRATCH:-${TMPDIR:-/tmp}}/slurm_script.XXXXXX") || exit 1
trap 'rm -f "$script"' EXIT
trap 'exit 143' TERM  # only then is the line above obeyed
printf %s "$SBATCH_SCRIPT" >"$script" && chmod 700 "$script" || exit 1
unset SBATCH_SCRIPT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK
"$script" "$@"
