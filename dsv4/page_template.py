"""The HTML, style and script of dsv4/page.py; @DATA@ is where the JSON goes.

SVG is written as markup, so that no namespace address is needed; the policy in the head forbids the page to load anything.
"""

# ruff: noqa: E501
HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>dsv4 run</title>
<style>
:root { color-scheme: light; --ink: #1d2433; --soft: #667089; --line: #dfe3ec; --blue: #2f6db5; --red: #c44e52; --pick: #f0b429; }
* { box-sizing: border-box; }
body { margin: 0; background: #f4f6fa; color: var(--ink); font: 14px/1.4 system-ui, "DejaVu Sans", sans-serif; }
header { position: sticky; top: 0; z-index: 2; background: #fff; border-bottom: 1px solid var(--line); padding: 10px 18px; }
h1 { font-size: 17px; margin: 0 0 2px; } h2 { font-size: 14px; margin: 0 0 2px; } * + h2 { margin-top: 10px; }
p { margin: 0 0 6px; color: var(--soft); font-size: 12px; }
#control { display: flex; align-items: center; gap: 12px; flex-wrap: wrap; }
#control input { flex: 1 1 260px; accent-color: var(--blue); } #control b { min-width: 210px; }
#words { max-height: 92px; overflow-y: auto; margin-top: 6px; line-height: 1.7; }
.word { padding: 1px 4px; border-radius: 4px; cursor: pointer; border: 0; background: none; font: inherit; color: inherit; }
.word:hover { background: #e6ecf7; } .word.on { background: var(--pick); }
main { display: grid; grid-template-columns: repeat(12, 1fr); gap: 12px; padding: 12px 18px 40px; }
section { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; min-width: 0; overflow-x: auto; }
.wide { grid-column: span 12; } .most { grid-column: span 7; } .rest { grid-column: span 5; } .half { grid-column: span 6; }
@media (max-width: 1000px) { .most, .rest, .half { grid-column: span 12; } }
table { border-collapse: collapse; width: 100%; font-size: 12.5px; }
td, th { padding: 2px 6px; text-align: left; border-bottom: 1px solid #eef1f6; vertical-align: top; } th { color: var(--soft); font-weight: 500; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.on td { background: #fdf3d8; } tr.go { cursor: pointer; }
.bar { height: 9px; border-radius: 2px; background: var(--blue); display: inline-block; vertical-align: middle; }
.bar.neg { background: var(--red); }
canvas { display: block; cursor: crosshair; } select { font: inherit; }
#tip { position: fixed; z-index: 3; pointer-events: none; background: #1d2433; color: #fff; padding: 5px 8px; border-radius: 5px; font-size: 12px;
  max-width: 420px; white-space: pre-line; display: none; }
svg text { font-size: 12px; fill: var(--ink); } svg .small { font-size: 10.5px; fill: var(--soft); }
</style>
</head>
<body>
<header>
<h1 id="title"></h1>
<p id="about"></p>
<div id="control"><label for="block">block</label><input id="block" type="range" min="0" value="0" step="1"><b id="which"></b></div>
<div id="words"></div>
</header>
<main>
<section class="wide"><h2>Streams through the block</h2>
<p>At the token chosen. Up: how much a sublayer reads of each stream (pre). Down: how much of its output each stream gets (post).
Across: how streams are mixed (comb). Width is weight; hover for numbers.</p><div id="mixing"></div></section>
<section class="most"><h2>Attention by token <select id="head" aria-label="head"></select></h2>
<p id="patternAbout"></p><canvas id="pattern"></canvas></section>
<section class="rest"><h2>What the query sees</h2><p>Attention by kind of key, mean over heads.</p><div id="mass"></div>
<h2 id="entriesTitle"></h2><p id="entriesAbout"></p><div id="entries"></div>
<h2>Experts of the token</h2><p id="routerAbout"></p><div id="experts"></div>
<h2>Heads of this block</h2><p>Their part of the logit below.</p><div id="heads"></div></section>
<section class="wide"><h2>Routing: the expert with the largest weight, by block and token</h2>
<p>Hover for all slots, click to go there.</p><canvas id="routing"></canvas></section>
<section class="half"><h2>Each block's streams read as the next token</h2><p>Readout "head": hc_head, final norm, head. Click a row to go to its block.</p>
<div id="lens"></div></section>
<section class="half"><h2 id="attributionTitle"></h2><p>Every sublayer's part of the logit; the sum is exact, with mixing and the final norm's scale
held at the run's.</p><div id="attribution"></div></section>
</main>
<div id="tip"></div>
<script id="data" type="application/json">@DATA@</script>
<script>
"""

SCRIPT = r"""
'use strict';
window.onerror = message => document.body.setAttribute('data-error', message);
const D = JSON.parse(document.getElementById('data').textContent);
const $ = id => document.getElementById(id);
const esc = s => String(s).replace(/[&<>"']/g, c => '&#' + c.charCodeAt(0) + ';');
const num = (x, d = 3) => x === null ? 'none' : (+x).toFixed(d);
const C = D.words.length, L = D.blocks.length;
const asked = new URLSearchParams(location.hash.slice(1));
const within = (x, n, other) => Number.isInteger(x) && x >= 0 && x < n ? x : other;
let block = within(parseInt(asked.get('block')), L, 0), token = within(parseInt(asked.get('token')), C, C - 1), map = 0;

// Patterns are decoded when they are first shown.
const decoded = new Map();
function pattern(b) {
  if (!decoded.has(b)) {
    const raw = atob(D.blocks[b].pattern), bytes = Uint8Array.from(raw, c => c.charCodeAt(0));
    const view = new DataView(bytes.buffer), out = new Float32Array(bytes.length / 2);
    for (let i = 0; i < out.length; i++) out[i] = view.getInt16(2 * i, true) / D.scale;
    decoded.set(b, out);
  }
  return decoded.get(b);
}

// Hover text: of elements through data-t, of canvases through their own function.
const tip = $('tip');
function hover(event, text) {
  tip.style.display = text ? 'block' : 'none';
  if (!text) return;
  tip.textContent = text;
  const right = event.clientX > innerWidth - 300, low = event.clientY > innerHeight - 120;
  tip.style.left = right ? '' : event.clientX + 14 + 'px'; tip.style.right = right ? innerWidth - event.clientX + 14 + 'px' : '';
  tip.style.top = low ? '' : event.clientY + 14 + 'px'; tip.style.bottom = low ? innerHeight - event.clientY + 14 + 'px' : '';
}
document.addEventListener('mousemove', event => {
  const found = event.target.closest('[data-t]');
  if (event.target.tagName !== 'CANVAS') hover(event, found && found.dataset.t);
});
const cellText = c => (D.note ? D.texts[c] + ' | ' : '') + D.words[c] + ' (position ' + D.positions[c] + ')';

function drawMixing() {
  const B = D.blocks[block], n = D.streams, gap = Math.max(16, Math.min(34, 160 / n)), top = 92, W = 1080, H = top + n * gap + 26;
  const columns = [70, 540, 1010], y = j => top + 12 + j * gap;
  let out = '<svg viewBox="0 0 ' + W + ' ' + H + '" width="100%" style="max-width:' + W + 'px" role="img">';
  ['attention', 'mlp'].forEach((site, k) => {
    const M = B[site], a = columns[k], z = columns[k + 1], middle = (a + z) / 2, pre = M.pre[token], post = M.post[token], comb = M.comb[token];
    const name = site === 'attention' ? 'attention (' + B.kind + ')' : 'mixture (' + B.router + ' router)';
    for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) {
      const w = comb[i][j];
      if (w < 0.003) continue;
      out += '<path d="M' + (a + 9) + ' ' + y(i) + ' C' + (a + 170) + ' ' + y(i) + ' ' + (z - 170) + ' ' + y(j) + ' ' + (z - 9) + ' ' + y(j) + '" fill="none" stroke="#8d97ab" stroke-opacity="' +
        (0.25 + 0.6 * w) + '" stroke-width="' + (0.6 + 9 * w) + '" data-t="' + site + '_comb: stream ' + i + ' to stream ' + j + ': ' + num(w, 4) + '"/>';
    }
    for (let j = 0; j < n; j++) {
      out += '<path d="M' + a + ' ' + y(j) + ' C' + (a + 60 + 14 * j) + ' ' + y(j) + ' ' + (a + 60) + ' 48 ' + (middle - 85) + ' 48" fill="none" stroke="#2f6db5" stroke-opacity="0.75" stroke-width="' +
        (0.4 + 7 * pre[j]) + '" data-t="' + site + '_pre: reads ' + num(pre[j], 4) + ' of stream ' + j + '"/>';
      out += '<path d="M' + (middle + 85) + ' 48 C' + (z - 60) + ' 48 ' + (z - 60 - 14 * j) + ' ' + y(j) + ' ' + z + ' ' + y(j) + '" fill="none" stroke="#c44e52" stroke-opacity="0.75" stroke-width="' +
        (0.4 + 3.5 * post[j]) + '" data-t="' + site + '_post: writes ' + num(post[j], 4) + ' of its output to stream ' + j + '"/>';
    }
    out += '<g data-t="' + name + '\n|output| = ' + num(M.norm[token]) + ' at this token"><rect x="' + (middle - 85) + '" y="28" width="170" height="40" rx="7" fill="#eef3fb" stroke="#2f6db5"/>' +
      '<text x="' + middle + '" y="46" text-anchor="middle">' + name + '</text><text class="small" x="' + middle + '" y="61" text-anchor="middle">|output| ' + num(M.norm[token], 2) + '</text></g>';
  });
  ['layer_input', 'layer_mid', 'layer_output'].forEach((name, k) => {
    out += '<text class="small" x="' + columns[k] + '" y="' + (H - 4) + '" text-anchor="middle">' + name + '</text>';
    for (let j = 0; j < n; j++) out += '<g data-t="' + name + ', stream ' + j + '"><circle cx="' + columns[k] + '" cy="' + y(j) + '" r="9" fill="#fff" stroke="#1d2433"/>' +
      '<text x="' + columns[k] + '" y="' + (y(j) + 4) + '" text-anchor="middle">' + j + '</text></g>';
  });
  $('mixing').innerHTML = out + '</svg>';
}

// A canvas of `rows` x `columns` cells with room for labels at the left and below.
function grid(id, rows, columns, cellW, cellH, left, bottom) {
  const canvas = $(id), scale = window.devicePixelRatio || 1, w = left + columns * cellW + 4, h = rows * cellH + bottom;
  canvas.width = w * scale; canvas.height = h * scale; canvas.style.width = w + 'px'; canvas.style.height = h + 'px';
  const context = canvas.getContext('2d');
  context.scale(scale, scale); context.textBaseline = 'middle'; context.fillStyle = '#1d2433';
  canvas.place = event => {
    const at = canvas.getBoundingClientRect(), x = Math.floor((event.clientX - at.left - left) / cellW), y = Math.floor((event.clientY - at.top) / cellH);
    return x >= 0 && x < columns && y >= 0 && y < rows ? [y, x] : null;
  };
  return context;
}
function wordsBelow(context, left, cellW, y, size) {
  const step = Math.ceil((size + 2) / cellW);
  context.font = size + 'px system-ui, "DejaVu Sans", sans-serif'; context.textAlign = 'right';
  for (let c = (C - 1) % step; c < C; c += step) {
    context.save(); context.translate(left + (c + 0.5) * cellW, y); context.rotate(-Math.PI / 2);
    context.fillStyle = c === token ? '#a26a00' : '#1d2433'; context.fillText(D.words[c].slice(0, 11), 0, 0); context.restore();
  }
}
const cellSize = Math.max(3, Math.min(26, Math.floor(600 / C)));
function drawPattern() {
  const B = D.blocks[block], P = pattern(block), base = map * C * C, left = cellSize >= 9 ? 66 : 8, context = grid('pattern', C, C, cellSize, cellSize, left, 70);
  let most = 1e-6;
  for (let i = 0; i < C * C; i++) most = Math.max(most, Math.abs(P[base + i]));
  for (let q = 0; q < C; q++) for (let k = 0; k < C; k++) {
    const v = P[base + q * C + k], share = Math.sqrt(Math.abs(v) / most);
    if (share < 0.02) { if (k > q) continue; context.fillStyle = '#f3f5f9'; }
    else context.fillStyle = (v < 0 ? 'rgba(196,78,82,' : 'rgba(31,88,160,') + share.toFixed(3) + ')';
    context.fillRect(left + k * cellSize, q * cellSize, cellSize - (cellSize > 5 ? 1 : 0), cellSize - (cellSize > 5 ? 1 : 0));
  }
  if (cellSize >= 9) {
    context.font = '9px system-ui, "DejaVu Sans", sans-serif'; context.textAlign = 'right';
    for (let q = 0; q < C; q++) { context.fillStyle = q === token ? '#a26a00' : '#1d2433'; context.fillText(D.words[q].slice(0, 11), left - 4, (q + 0.5) * cellSize); }
  }
  wordsBelow(context, left, cellSize, C * cellSize + 4, 9);
  context.strokeStyle = '#f0b429'; context.lineWidth = 2; context.strokeRect(left, token * cellSize, C * cellSize, cellSize);
  $('patternAbout').textContent = 'Rows are queries, columns the tokens seen' + (B.kind === 'sliding' ? '' : '; every entry is split into its tokens, red where a token points against its entry') +
    '. Click a row to choose its token.' + (D.note ? ' ' + D.note + ': summed over keys, mean over queries.' : '');
}
function drawMass() {
  const M = D.blocks[block].mass[token], names = ['window', 'entries', 'sink'], colours = ['#2f6db5', '#5aa469', '#b8bfcc'];
  let out = '<div style="display:flex;height:20px;border-radius:4px;overflow:hidden">';
  M.forEach((m, i) => { out += '<div style="width:' + 100 * m + '%;background:' + colours[i] + '" data-t="' + names[i] + ': ' + num(m, 4) + '"></div>'; });
  $('mass').innerHTML = out + '</div><p>' + M.map((m, i) => '<span style="color:' + colours[i] + '">&#9632;</span> ' + names[i] + ' ' + num(m)).join(' &nbsp; ') + '</p>';
}
const bar = (share, value, text) => '<span class="bar' + (value < 0 ? ' neg' : '') + '" style="width:' + Math.max(1, 120 * Math.min(1, Math.abs(share))).toFixed(1) + 'px" data-t="' + esc(text) + '"></span>';
function drawEntries() {
  const B = D.blocks[block];
  $('entriesTitle').textContent = B.kind === 'CSA' ? "The indexer's selection" : 'Compressed entries';
  if (!B.entries) { $('entriesAbout').textContent = 'A sliding block has none.'; $('entries').innerHTML = ''; return; }
  const E = B.entries[token];
  $('entriesAbout').textContent = (B.kind === 'CSA' ? 'Kept ' + E.kept + ' of ' : 'Sees all ') + E.closed + ' closed entries' + (E.listed.length < E.kept ? '; the ' + E.listed.length + ' most attended' : '') + '.';
  let out = '<table><tr><th>entry</th><th>words</th>' + (B.kind === 'CSA' ? '<th>score</th>' : '') + '<th>attention</th><th></th></tr>';
  E.listed.forEach(x => { out += '<tr><td class="n">' + x[0] + '</td><td>' + esc(x[1]) + '</td>' + (B.kind === 'CSA' ? '<td class="n">' + num(x[2]) + '</td>' : '') +
    '<td class="n">' + num(x[3]) + '</td><td>' + bar(x[3], 1, 'attention on entry ' + x[0] + ', mean over heads: ' + num(x[3], 4)) + '</td></tr>'; });
  $('entries').innerHTML = E.listed.length ? out + '</table>' : '';
}
const slots = (b, c) => D.blocks[b].expertIndices[c].map((e, k) => [e, D.blocks[b].expertWeights[c][k]]);
function drawExperts() {
  const B = D.blocks[block], margin = B.margins && B.margins[token];
  $('routerAbout').textContent = B.router === 'hash' ? "Hash router: chosen by the token's id." : 'Score router; margin to the first left out: ' + num(margin, 4) + '.';
  const most = Math.max(...slots(block, token).map(x => x[1]), 1e-6);
  $('experts').innerHTML = '<table>' + slots(block, token).map(x => '<tr><td class="n">expert ' + x[0] + '</td><td class="n">' + num(x[1]) + '</td><td>' +
    bar(x[1] / most, x[1], 'weight of expert ' + x[0] + ': ' + num(x[1], 4)) + '</td></tr>').join('') + '</table>';
}
const colour = e => 'hsl(' + (e * 137.508) % 360 + ' 62% ' + (66 + 9 * (e % 3)) + '%)';
const routeW = Math.max(4, Math.min(30, Math.floor(1120 / C))), routeH = Math.max(8, Math.min(20, Math.floor(480 / L)));
function drawRouting() {
  const context = grid('routing', L, C, routeW, routeH, 66, 70);
  for (let b = 0; b < L; b++) {
    context.font = '10px system-ui, "DejaVu Sans", sans-serif'; context.textAlign = 'right'; context.fillStyle = b === block ? '#a26a00' : '#1d2433';
    if (routeH >= 10 || b % 2 === 0) context.fillText(D.blocks[b].layer + (D.blocks[b].router === 'hash' ? ' hash' : ''), 60, (b + 0.5) * routeH);
    for (let c = 0; c < C; c++) {
      const e = D.blocks[b].expertIndices[c][0];
      context.fillStyle = colour(e); context.fillRect(66 + c * routeW, b * routeH, routeW - 1, routeH - 1);
      if (routeW >= 15 && routeH >= 12) { context.fillStyle = '#1d2433'; context.textAlign = 'center'; context.fillText(e, 66 + (c + 0.5) * routeW, (b + 0.5) * routeH); }
    }
  }
  wordsBelow(context, 66, routeW, L * routeH + 4, 10);
  context.strokeStyle = '#1d2433'; context.lineWidth = 2;
  context.strokeRect(66, block * routeH, C * routeW, routeH); context.strokeRect(66 + token * routeW, 0, routeW, L * routeH);
}
function drawLens() {
  $('lens').innerHTML = '<table>' + D.lens.map((layer, b) => '<tr class="go' + (b === block ? ' on' : '') + '" data-block="' + b + '"><td class="n">' + D.blocks[b].layer + '</td>' +
    layer[token].map(x => '<td style="box-shadow:inset 0 -3px 0 rgba(47,109,181,' + x[1] + ')" data-t="' + esc(x[0]) + ': ' + num(x[1], 4) + '">' + esc(x[0]) + ' <span style="color:var(--soft)">' + num(x[1], 2) + '</span></td>').join('') +
    '</tr>').join('') + '</table>';
}
function drawAttribution() {
  const A = D.attribution, values = A.values.map(v => v[token]), most = Math.max(...values.map(Math.abs), 1e-9);
  $('attributionTitle').textContent = 'Logit of ' + D.answers[token][0] + ' after ' + D.words[token] + ': ' + num(A.total[token]);
  $('attribution').innerHTML = '<table>' + values.map((v, i) => '<tr class="' + (A.blocks[i] < 0 ? '' : 'go') + (A.blocks[i] === block ? ' on' : '') + '" data-block="' + A.blocks[i] + '"><td>' + esc(A.labels[i]) +
    '</td><td class="n">' + num(v) + '</td><td>' + bar(v / most, v, A.labels[i] + ': ' + num(v, 4)) + '</td></tr>').join('') + '</table>';
  const H = D.blocks[block].headValues[token], top = Math.max(...H.map(Math.abs), 1e-9);
  $('heads').innerHTML = '<table>' + H.map((v, i) => [v, i]).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, 16).map(x => '<tr><td>head ' + x[1] + '</td><td class="n">' + num(x[0]) +
    '</td><td>' + bar(x[0] / top, x[0], 'head ' + x[1] + ' of block ' + D.blocks[block].layer + ': ' + num(x[0], 4)) + '</td></tr>').join('') + '</table>';
}
function draw() {
  const B = D.blocks[block];
  $('block').value = block;
  $('which').textContent = 'block ' + B.layer + ' of ' + L + ': ' + B.kind + ', ' + B.router + ' router';
  document.querySelectorAll('.word').forEach((w, c) => w.classList.toggle('on', c === token));
  const strip = $('words'), chosen = strip.children[token];
  strip.scrollTop = chosen.offsetTop - strip.offsetTop - strip.clientHeight / 2;
  drawMixing(); drawPattern(); drawMass(); drawEntries(); drawExperts(); drawRouting(); drawLens(); drawAttribution();
  document.body.setAttribute('data-drawn', block + '/' + token);
}
function go(b, t) { block = within(b, L, block); token = within(t, C, token); draw(); }

$('title').textContent = D.words.slice(-12).join(' ') + '  \u2192  ' + D.answers[C - 1][0] + ' ' + num(D.answers[C - 1][1], 4);
document.title = 'dsv4: ' + D.words[C - 1] + ' \u2192 ' + D.answers[C - 1][0];
$('about').textContent = D.model + '; ' + D.tokens + ' tokens.' + (D.note ? ' Downsampled: ' + D.note + '; what is not a pattern is that of the cell\u2019s last token.' : '') + ' Click a token; arrow keys change the block.';
$('block').max = L - 1;
$('words').innerHTML = D.words.map((w, c) => '<button class="word" data-c="' + c + '" data-t="' + esc(cellText(c) + '\nnext: ' + D.answers[c][0] + ' ' + num(D.answers[c][1])) + '">' + esc(w) + '</button>').join('');
$('head').innerHTML = ['mean over heads', ...Array.from({ length: D.heads }, (_, i) => 'head ' + i)].map((t, i) => '<option value="' + i + '">' + t + '</option>').join('');
if (D.heads < D.allHeads) $('head').title = 'only these are in the file, of ' + D.allHeads;
$('words').addEventListener('click', e => e.target.dataset.c && go(block, +e.target.dataset.c));
$('block').addEventListener('input', e => go(+e.target.value, token));
$('head').addEventListener('change', e => { map = +e.target.value; drawPattern(); });
['lens', 'attribution'].forEach(id => $(id).addEventListener('click', e => { const r = e.target.closest('tr.go'); if (r) go(+r.dataset.block, token); }));
document.addEventListener('keydown', e => {
  if (['SELECT', 'INPUT'].includes(e.target.tagName)) return;
  if (e.key === 'ArrowRight') go(block + 1, token);
  if (e.key === 'ArrowLeft') go(block - 1, token);
});
$('pattern').addEventListener('mousemove', e => {
  const at = $('pattern').place(e);
  hover(e, at && 'query ' + cellText(at[0]) + '\nsees ' + cellText(at[1]) + '\n' + num(pattern(block)[map * C * C + at[0] * C + at[1]], 4));
});
$('pattern').addEventListener('click', e => { const at = $('pattern').place(e); if (at) go(block, at[0]); });
$('routing').addEventListener('mousemove', e => {
  const at = $('routing').place(e);
  hover(e, at && 'block ' + D.blocks[at[0]].layer + ', ' + cellText(at[1]) + '\n' + slots(...at).map(x => 'expert ' + x[0] + ' x ' + num(x[1])).join('\n'));
});
$('routing').addEventListener('click', e => { const at = $('routing').place(e); if (at) go(at[0], at[1]); });
draw();
</script>
</body>
</html>
"""

PAGE = HEAD + SCRIPT
