"""How a report looks: one sheet, light and dark, on screen and on paper."""

STYLE = """
:root{color-scheme:light dark}
:root{--ink:#1d2733;--soft:#5c6773;--line:#dde2e8;--paper:#fff;--card:#f6f8fa;--warn:#b45309}
@media(prefers-color-scheme:dark){
:root{--ink:#e6eaee;--soft:#9aa5b1;--line:#333c47;--paper:#14181d;--card:#1c2229;--warn:#f0a04b}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1000px;padding:24px;color:var(--ink);background:var(--paper);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:26px;margin:0 0 4px}
h2{font-size:19px;margin:36px 0 10px;border-bottom:1px solid var(--line);padding-bottom:4px}
h3{font-size:15px;margin:20px 0 6px}
p.lead{font-size:17px;margin:6px 0 18px}
.soft{color:var(--soft)}
table{border-collapse:collapse;width:100%;font-size:14px}
td,th{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px;margin:16px 0}
.facts div{background:var(--card);border-radius:8px;padding:10px 12px}
.facts b{display:block;font-size:19px;font-variant-numeric:tabular-nums}
.facts span{color:var(--soft);font-size:13px}
ul.warnings{list-style:none;padding:0;margin:0}
ul.warnings li{border-left:3px solid var(--warn);background:var(--card);padding:8px 12px;margin:8px 0;
border-radius:0 8px 8px 0}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(290px,100%),1fr));gap:14px}
figure{margin:0;background:var(--card);border-radius:8px;padding:10px}
figure.wide{grid-column:1/-1}
figcaption{font-weight:600;font-size:13px;margin-bottom:4px}
figure>svg{width:100%;height:auto;display:block}
svg text{font-size:12px;fill:var(--soft)}svg text.on{fill:#fff;font-weight:600}
.grid{stroke:var(--line)}
.legend{margin:6px 0 0;font-size:12px;color:var(--soft);display:flex;flex-wrap:wrap;gap:4px 14px}
.key{width:10px;height:10px;margin-right:5px}
.sample{background:var(--card);border-radius:8px;padding:10px 14px;margin:10px 0}
.sample p{margin:0 0 6px;font-size:13px;color:var(--soft)}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0;font:13px/1.45 ui-monospace,monospace;
max-height:320px;overflow:auto}
.tokens{font:14px/1.9 ui-monospace,monospace;overflow-wrap:anywhere}
.tokens span{border-radius:3px;white-space:pre-wrap}
.tokens .out{opacity:.45}
.g1{background:#2a6fb022}.g2{background:#2a6fb055}.g3{background:#d9822b55}.g4{background:#d9822b99}.g5{background:#b0413eaa}
.seam{border-left:2px solid #7a5ba8;margin-left:2px;padding-left:2px}
details{margin:10px 0}summary{cursor:pointer}
@media print{body{max-width:none}.sample,figure,li{break-inside:avoid}pre{max-height:none}}
"""
