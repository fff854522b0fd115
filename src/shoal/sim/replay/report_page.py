"""The frame of the report: HTML, its style, and the few lines that draw the plots."""

from __future__ import annotations

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Replay of @TITLE@</title>
<style>
  :root { --ink: #18212f; --soft: #5b6676; --rule: #e4e8ef; --back: #f5f7fa; }
  * { box-sizing: border-box; }
  body { margin: 0; background: var(--back); color: var(--ink);
         font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
  main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 60px; }
  h1 { font-size: 26px; margin: 0 0 6px; letter-spacing: -0.01em; }
  h2 { font-size: 17px; margin: 0 0 2px; }
  .plot + h2 { margin-top: 20px; }
  h3 { font-size: 14px; margin: 18px 0 0; color: var(--soft); font-weight: 600; }
  p { margin: 0 0 8px; color: var(--soft); max-width: 78ch; }
  ul.facts { list-style: none; padding: 0; margin: 0 0 22px; color: var(--soft); }
  ul.facts li { display: inline; }
  ul.facts li + li::before { content: "·"; margin: 0 9px; }
  section { background: #fff; border: 1px solid var(--rule); border-radius: 10px;
            padding: 20px 22px; margin-bottom: 18px; }
  .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 18px; }
  .pair section { min-width: 0; }
  @media (max-width: 860px) { .pair { grid-template-columns: 1fr; gap: 0; } }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
  thead th { text-align: right; font-weight: 600; padding: 4px 14px 8px; white-space: nowrap; }
  thead i { display: inline-block; width: 10px; height: 10px; border-radius: 3px;
            margin-right: 7px; }
  tbody th { text-align: left; font-weight: 400; color: var(--soft); white-space: nowrap;
             padding: 5px 14px 5px 0; }
  td { text-align: right; padding: 5px 14px; min-width: 116px; }
  tbody tr { border-top: 1px solid var(--rule); }
  td b { font-weight: 500; }
  td.best b { font-weight: 700; color: #0b7a5b; }
  td s { display: block; height: 3px; border-radius: 2px; margin: 2px 0 0 auto; opacity: .38; }
  .plot { width: 100%; }
  footer { color: var(--soft); font-size: 13px; }
</style>
</head>
<body>
<main>
<h1>Replay of @TITLE@</h1>
<ul class="facts">@FACTS@</ul>
<section>
  <h2>Policies side by side</h2>
  <p>The best of each line is green. Times are of jobs, shares are of the cluster.</p>
  <div class="scroll">@TABLE@</div>
</section>
<section>
  <h2>Utilization over time</h2>
  <p>Share of the working @UNIT@s that jobs held.</p>
  <div class="plot" id="utilization"></div>
  <h2>Queue over time</h2>
  <p>@UNIT@s that waiting jobs asked for.</p>
  <div class="plot" id="queue"></div>
</section>
<div class="pair">
<section>
  <h2>Waiting by size</h2>
  <p>From submission to the first placement, by @UNIT@s of the job.</p>
  <div class="plot" id="sizes"></div>
</section>
<section>
  <h2>Completion</h2>
  <p>From submission to the end: further left is better.</p>
  <div class="plot" id="curves"></div>
</section>
</div>
<section>
  <h2>Where the GPU time went</h2>
  <p>All of it, from the first submission to the last end, by the ledger's accounts.</p>
  @COSTS@
  <div class="plot" id="accounts"></div>
</section>
<section>
  <h2>Cluster timeline</h2>
  <p>Each row is a @UNIT@, each colour a job. A large cluster shows some of its nodes.</p>
  @TIMELINES@
</section>
<footer>Made by <code>shoal sim</code>.</footer>
</main>
<script>@PLOTLY@</script>
<script>
const plots = @DATA@;
const grid = { gridcolor: "#e9edf3", zerolinecolor: "#d5dbe5", linecolor: "#d5dbe5" };
for (const [id, plot] of Object.entries(plots)) {
  const own = plot.layout;
  const layout = Object.assign({
    height: 320, margin: { l: 62, r: 14, t: 12, b: 48 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", size: 12.5,
            color: "#39434f" },
    legend: { orientation: "h", y: 1.12, x: 0 }, hoverlabel: { align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: "#b6bfcc", activecolor: "#5b6676",
               remove: ["lasso2d", "select2d"] },
  }, own, {
    xaxis: Object.assign({}, grid, own.xaxis), yaxis: Object.assign({}, grid, own.yaxis),
  });
  Plotly.newPlot(id, plot.data, layout, { responsive: true, displaylogo: false });
}
</script>
</body>
</html>
"""
