"""Style and script of the report page. No network: no font, image or script comes from elsewhere."""

from __future__ import annotations

__all__ = ["PAGE", "SCRIPT", "STYLE"]

STYLE = """
:root{--bg:#fbfaf8;--card:#fff;--ink:#1d2126;--soft:#5b636d;--line:#e2e0db;--accent:#b4461e;--idle:#ecebe7;--in:#fff;
--c0:#b4461e;--c1:#2f6f9f;--c2:#5a8f3d;--c3:#8a5fa8;--c4:#c08a1e;--c5:#2f8f8a;--c6:#a8465f;--c7:#66707c;--c8:#7d8f2f;
--c9:#3f5fa8;--c10:#a8703f;--c11:#9aa2ab}
html[data-theme=dark]{--bg:#14171a;--card:#1c2024;--ink:#e8e6e1;--soft:#9aa3ad;--line:#30353b;--accent:#f08a5d;
--idle:#24292e;--in:#14171a;--c0:#f08a5d;--c1:#6cb0de;--c2:#93c572;--c3:#c39be0;--c4:#e6bb5c;--c5:#69c8c2;--c6:#e58aa2;
--c7:#a5afba;--c8:#b9cc66;--c9:#8ea9ec;--c10:#dba878;--c11:#6a737d}
@media (prefers-color-scheme:dark){html:not([data-theme=light]){
--bg:#14171a;--card:#1c2024;--ink:#e8e6e1;--soft:#9aa3ad;
--line:#30353b;--accent:#f08a5d;--idle:#24292e;--in:#14171a;--c0:#f08a5d;--c1:#6cb0de;--c2:#93c572;--c3:#c39be0;
--c4:#e6bb5c;--c5:#69c8c2;--c6:#e58aa2;--c7:#a5afba;--c8:#b9cc66;--c9:#8ea9ec;--c10:#dba878;--c11:#6a737d}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1200px;margin:0 auto;padding:24px 20px 60px}
header{display:flex;justify-content:space-between;gap:16px;align-items:flex-start}
h1{font-size:24px;margin:0 0 2px}h2{font-size:17px;margin:0 0 12px}
p{margin:6px 0}.note{color:var(--soft);font-size:13px}
nav{margin:10px 0 0}nav a{color:var(--accent);margin-right:14px;text-decoration:none}
nav a:hover{text-decoration:underline}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:18px 20px;margin-top:18px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px;margin-top:18px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 16px}
.tile b{display:block;font-size:22px;font-variant-numeric:tabular-nums}.tile span{color:var(--soft);font-size:13px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:13.5px}
th,td{text-align:right;padding:4px 8px;border-bottom:1px solid var(--line);white-space:nowrap}
td.w,th.w,.legend td:first-child{text-align:left}td.why{white-space:normal;text-align:left;color:var(--soft)}
th{font-weight:600;color:var(--soft)}th button{all:unset;cursor:pointer;font-weight:600}
th button:focus-visible,.dot:focus-visible,
button:focus-visible,a:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
th[aria-sort=ascending] button::after{content:" \\2191"}th[aria-sort=descending] button::after{content:" \\2193"}
tbody tr:hover{background:color-mix(in srgb,var(--accent) 8%,transparent)}tr.best td{font-weight:600}
.scroll{overflow-x:auto}.two{display:grid;grid-template-columns:1fr 1fr;gap:28px;margin-top:10px}
.two>*{align-self:start}
@media (max-width:800px){.two{grid-template-columns:1fr}}
svg{width:100%;height:auto;display:block;overflow:visible}svg text{font:12px system-ui,sans-serif;fill:var(--ink)}
svg text.axis{fill:var(--soft)}svg text.in{fill:var(--in);font-weight:600;pointer-events:none}
.grid{stroke:var(--line);stroke-width:1}.limit{stroke:var(--accent);stroke-width:1.5;stroke-dasharray:6 4}
.front{fill:none;stroke:var(--c1);stroke-width:1.5}.dot{fill:var(--c1);stroke:var(--card);stroke-width:1.5}
.dot:hover{fill:var(--accent)}
.idle{fill:var(--idle);background:var(--idle)}
.key{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:6px;vertical-align:-1px}
.keys span{margin-right:16px;font-size:13px;color:var(--soft);white-space:nowrap}
.kF{fill:var(--c1);background:var(--c1)}.kB,.kI{fill:var(--c0);background:var(--c0)}
.kW{fill:var(--c4);background:var(--c4)}
.kdp{fill:var(--c3);background:var(--c3)}.koptimizer{fill:var(--c2);background:var(--c2)}
#theme{background:var(--card);color:var(--ink);border:1px solid var(--line);border-radius:6px;
padding:6px 12px;cursor:pointer;font:inherit;white-space:nowrap}
""" + "".join(f".c{i}{{fill:var(--c{i});background:var(--c{i})}}" for i in range(12))

SCRIPT = """
const root=document.documentElement,theme=document.getElementById('theme');
theme.addEventListener('click',()=>{
  const dark=root.dataset.theme?root.dataset.theme==='dark':matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme=dark?'light':'dark';
});
const table=document.getElementById('ranking');
table.querySelectorAll('th button').forEach((button,column)=>button.addEventListener('click',()=>{
  const head=button.parentElement,up=head.getAttribute('aria-sort')!=='ascending',body=table.tBodies[0];
  table.querySelectorAll('th').forEach(th=>th.removeAttribute('aria-sort'));
  head.setAttribute('aria-sort',up?'ascending':'descending');
  const key=row=>row.cells[column].dataset.v??row.cells[column].textContent;
  const rows=[...body.rows].sort((a,b)=>{
    const x=key(a),y=key(b),n=Number(x)-Number(y);
    return (Number.isNaN(n)?x.localeCompare(y):n)*(up?1:-1);
  });
  body.append(...rows);
}));
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';
style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title><style>{style}</style></head>
<body><main>{body}</main><script>{script}</script></body></html>
"""
