# Fails until the attempt named in FAILS_UNTIL.
echo "attempt $SHOAL_ATTEMPT"
if [ "$SHOAL_ATTEMPT" -lt "${FAILS_UNTIL:-2}" ]; then
    echo "no luck" >&2
    exit 1
fi
echo "done"
