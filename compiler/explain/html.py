"""An explanation as one page: table, drawing, stages side by side, MLIR, a linear's levels. No network, no other file."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from fp4.compiler.explain.table import HEADINGS

if TYPE_CHECKING:
    from fp4.compiler.explain.explanation import Explanation

SHOWN = ("captured", "tagged", "rewritten", "forward", "backward", "lowered")


def page(explained: Explanation, linears: Sequence[str] = ()) -> str:
    """The page's text. linears: those shown at every level, kernels included for a GPU target."""
    table = explained.table(collapse=True)
    title = f"{explained.model}, policy {explained.policy.name}, target {explained.target}"
    texts = {stage: explained.fx(stage) for stage in SHOWN if stage != "backward" or explained.graphs[0].backward is not None}
    texts["MLIR, rewritten"] = explained.mlir()
    for linear in linears:
        texts |= {f"{linear}: {name}": text for name, text in explained.levels(linear).sections()}
    parts = {
        "@TITLE@": escape(title),
        "@SUMMARY@": "".join(f"<p>{escape(line)}</p>" for line in table.summary()),
        "@TABLE@": "".join(_table(table.rows())),
        "@DRAWING@": explained.draw().svg(),
        "@TEXTS@": json.dumps({name: _packed(text) for name, text in texts.items()}),
    }
    made = PAGE
    for mark, text in parts.items():
        made = made.replace(mark, text)
    return made


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield "<table><thead><tr>" + "".join(f"<th>{h}</th>" for h in HEADINGS) + "</tr></thead>"
    name = ""
    for row in rows:
        if row[0]:
            yield "</tbody>" if name else ""
            name = row[0]
            yield f'<tbody data-name="{escape(name)}">'
        yield "<tr>" + "".join(f"<td{_kind(cell)}>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</tbody></table>"


def _kind(cell: str) -> str:
    kind = next((k for k in ("nvfp4", "mxfp4", "mxfp8", "fp8") if f" {k}" in cell), "")
    return f' class="{kind}"' if kind else ""


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
body { font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif; margin: 0; color: #1b1f24; background: #fff; }
header { position: sticky; top: 0; z-index: 2; background: #fff; border-bottom: 1px solid #d5d9de; padding: 10px 20px; }
h1 { font-size: 17px; margin: 0 0 6px; }
header p { margin: 0; color: #57606a; font-size: 12.5px; }
nav { display: flex; gap: 6px; align-items: center; margin-top: 8px; }
button { font: inherit; padding: 3px 12px; border: 1px solid #c4c8cc; border-radius: 6px; background: #f4f5f7; }
button { cursor: pointer; }
button.on { background: #1b1f24; color: #fff; border-color: #1b1f24; }
input { font: inherit; padding: 3px 8px; border: 1px solid #c4c8cc; border-radius: 6px; width: 260px; margin-left: auto; }
section { display: none; padding: 14px 20px; }
section.on { display: block; }
table { border-collapse: collapse; font-size: 12.5px; }
th { text-align: left; border-bottom: 2px solid #1b1f24; padding: 3px 10px 3px 4px; white-space: nowrap; }
td { padding: 2px 10px 2px 4px; white-space: nowrap; }
tbody { border-bottom: 1px solid #e3e6e9; }
tr td:first-child { font-weight: 600; }
.nvfp4 { background: #dcf2e4; } .mxfp4 { background: #d5f0f1; } .fp8 { background: #dfeafa; } .mxfp8 { background: #e8e3f8; }
.panes { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 12px; }
select { font: inherit; max-width: 100%; }
pre { font: 11.5px/1.4 "DejaVu Sans Mono", ui-monospace, monospace; margin: 6px 0 0; padding: 8px; border: 1px solid #d5d9de;
  border-radius: 6px; overflow: auto; height: calc(100vh - 230px); background: #fbfcfd; }
pre span { display: block; }
pre .less { background: #fde8e6; } pre .more { background: #dcf2e4; } pre .place { color: #7a828b; }
mark { background: #ffe58a; }
.count { color: #57606a; font-size: 12px; margin-left: 8px; }
svg { max-width: 100%; height: auto; }
svg rect.dim { opacity: 0.15; }
</style>
</head>
<body>
<header>
<h1>@TITLE@</h1>
@SUMMARY@
<nav>
<button data-tab="table">Table</button><button data-tab="drawing">Drawing</button><button data-tab="stages">Stages</button>
<input id="search" type="search" placeholder="search: a linear, an op, a format">
<span class="count" id="count"></span>
</nav>
</header>
<section id="table">@TABLE@</section>
<section id="drawing">@DRAWING@</section>
<section id="stages"><div class="panes">
<div><select id="left"></select><pre id="leftcode"></pre></div>
<div><select id="right"></select><pre id="rightcode"></pre></div>
</div></section>
<script type="application/json" id="texts">@TEXTS@</script>
<script>
"use strict";
const packed = JSON.parse(document.getElementById("texts").textContent), texts = {};
const $ = (id) => document.getElementById(id);
async function text(name) {
  if (!(name in texts)) {
    const bytes = Uint8Array.from(atob(packed[name]), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    texts[name] = (await new Response(stream).text()).split("\\n");
  }
  return texts[name];
}
const clean = (s) => s.replace(/&/g, "&amp;").replace(/</g, "&lt;");
function marked(line, query) {
  if (!query) return clean(line);
  const at = line.toLowerCase().indexOf(query);
  if (at < 0) return clean(line);
  const end = at + query.length;
  return clean(line.slice(0, at)) + "<mark>" + clean(line.slice(at, end)) + "</mark>" + clean(line.slice(end));
}
function show(pre, lines, other, kind, query) {
  const known = new Set(other.map((l) => l.trim())), out = [];
  let within = false;  // a place that is searched for is shown whole
  for (const line of lines) {
    const place = line.trim().startsWith("#"), hit = line.toLowerCase().includes(query);
    if (place) within = hit;
    if (!hit && !within) continue;
    const name = place ? "place" : known.has(line.trim()) ? "" : kind;
    out.push("<span class='" + name + "'>" + (marked(line, query) || " ") + "</span>");
  }
  pre.innerHTML = out.join("");
  return out.length;
}
async function stages(query) {
  const left = await text($("left").value), right = await text($("right").value);
  const n = show($("leftcode"), left, right, "less", query) + show($("rightcode"), right, left, "more", query);
  document.body.dataset.ready = [$("left").value, $("right").value, query].join("|");
  return n;
}
async function update() {
  const query = $("search").value.trim().toLowerCase();
  const tab = document.querySelector("section.on").id;
  let n = 0;
  for (const body of document.querySelectorAll("#table tbody")) {
    const hit = body.textContent.toLowerCase().includes(query);
    body.style.display = hit ? "" : "none";
    n += tab === "table" && hit;
  }
  for (const rect of document.querySelectorAll("#drawing rect[data-name]")) {
    const hit = rect.dataset.name.toLowerCase().includes(query);
    rect.classList.toggle("dim", !hit);
    n += tab === "drawing" && hit;
  }
  if (tab === "stages") n = await stages(query);
  $("count").textContent = query ? n + (tab === "stages" ? " lines" : " found") : "";
}
function open(tab) {
  for (const s of document.querySelectorAll("section")) s.classList.toggle("on", s.id === tab);
  for (const b of document.querySelectorAll("button")) b.classList.toggle("on", b.dataset.tab === tab);
  return update();
}
for (const side of ["left", "right"]) {
  for (const name of Object.keys(packed)) $(side).add(new Option(name));
  $(side).addEventListener("change", update);
}
$("left").value = "tagged";
$("right").value = "rewritten";
for (const b of document.querySelectorAll("button")) b.addEventListener("click", () => open(b.dataset.tab));
$("search").addEventListener("input", update);
const asked = new URLSearchParams(location.hash.slice(1));
$("search").value = asked.get("search") || "";
for (const side of ["left", "right"]) if (asked.get(side) in packed) $(side).value = asked.get(side);
open(asked.get("tab") || "table");
</script>
</body>
</html>
"""
