'use strict';
// The page keeps the newest rows in memory and builds everything with
// textContent: nothing of a mail is ever parsed as HTML outside the sandboxed
// frame.
const KEEP = 2000, SHOW = 200;
const $ = id => document.getElementById(id);
const state = { rows: [], running: [], doubled: new Set(), holds: [], tab: 'all', q: '', picked: null, base: null, limit: SHOW };

function el(tag, props, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(props || {})) {
    if (k === 'on') e.addEventListener('click', v);
    else if (k in e && k !== 'list') e[k] = v; else e.setAttribute(k, v);
  }
  for (const c of children) if (c !== null && c !== undefined) e.append(c);
  return e;
}
async function api(path, opt) {
  const r = await fetch(path, opt);
  const text = await r.text();
  const body = text ? JSON.parse(text) : {};
  if (!r.ok) throw new Error(body.error || r.statusText);
  return body;
}
const post = (path, body) => api(path, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body) });

const tabs = {
  all: ['All', () => true], struck: ['Faults', r => r.fault], doubled: ['Doubled', r => r.copy > 1],
  silent: ['No answer', r => r.seq && !r.reply_written], refused: ['Refused', r => r.reply_written && r.code >= 400], breach: ['Breaches', r => r.breach],
  findings: ['Findings', r => r.findings],
};
function when(ns) {
  if (!state.base) return '';
  return new Date(state.base.wall + (ns - state.base.now) / 1e6).toTimeString().slice(0, 8);
}
function marks(r) {
  const m = [];
  const add = (text, cls) => m.push(el('span', { className: 'mark ' + (cls || ''), textContent: text }));
  if (!r.seq) add('running', 'warn');
  if (r.copy > 1) add('copy ' + r.copy, 'bad'); else if (r.stored) add('stored', 'ok');
  if (r.deduplicated) add('duplicate, dropped', 'ok');
  if (r.closed_without_storing) add('not stored');
  if (r.breach) add('breach', 'bad');
  for (const f of r.findings || []) add(f, 'bad');
  if (r.fault) add(r.fault, 'warn');
  if (r.reply_written) add(String(r.code), r.code < 300 ? 'ok' : 'warn'); else if (r.seq) add('no answer', 'bad');
  return el('div', { className: 'marks' }, ...m);
}
const name = r => (r.key || r.message_id) + ' ' + r.recipient;
function rowElement(r) {
  return el('button', { className: 'row' + (state.doubled.has(name(r)) ? ' doubled' : '') + (state.picked === r.id ? ' on' : ''), on: () => pick(r) },
    el('span', { className: 'when', textContent: when(r.to || r.from) }),
    el('span', {}, el('span', { className: 'cut key mono', textContent: r.key || r.message_id || '(no key)' }), el('small', { className: 'cut', textContent: r.client })),
    el('span', { className: 'what' }, el('span', { className: 'cut', textContent: r.recipient || r.sender || '(no recipient)' }), el('small', { className: 'cut', textContent: r.subject || 'reached ' + r.stage })),
    marks(r));
}
function visible(r) {
  if (!tabs[state.tab][1](r)) return false;
  if (!state.q) return true;
  return [r.key, r.message_id, r.recipient, r.sender, r.client, r.subject, r.fault, r.reply, r.findings].join(' ').toLowerCase().includes(state.q);
}
let drawing = false;
function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const list = [...state.running, ...state.rows].filter(visible);
    const out = list.slice(0, state.limit).map(rowElement);
    if (list.length > state.limit) out.push(el('button', { className: 'row', textContent: `Show more (${list.length - state.limit})`, on: () => { state.limit += SHOW; draw(); } }));
    $('rows').replaceChildren(...out);
    $('empty').hidden = list.length > 0;
  });
}
function drawTabs() {
  $('tabs').replaceChildren(...Object.entries(tabs).map(([k, [label]]) =>
    el('button', { role: 'tab', ariaSelected: String(k === state.tab), textContent: label, on: () => { state.tab = k; state.limit = SHOW; drawTabs(); draw(); } })));
}
function drawTiles(t) {
  const tile = (n, label, bad) => el('div', { className: 'tile' + (bad && n ? ' bad' : '') }, el('b', { textContent: n.toLocaleString() }), el('span', { textContent: label }));
  $('tiles').replaceChildren(tile(t.rows, 'tries'), tile(t.stored, 'stored'), tile(t.doubled, 'doubled', true), tile(t.deduplicated, 'deduplicated'),
    tile(t.silent, 'no answer'), tile(t.refused, 'refused'), tile(t.struck, 'struck'), tile(t.breaches, 'breaches', true), ...(t.findings ? [tile(t.findings, 'findings', true)] : []));
}
function drawHolds() {
  $('held').hidden = state.holds.length === 0;
  $('holds').replaceChildren(...state.holds.map(h => el('div', { className: 'item' },
    el('div', {}, el('span', { className: 'mono', textContent: h.key || h.recipient || 'session ' + h.session }), el('small', { textContent: `at ${h.stage}, ${h.client || 'no name yet'}${h.peer_gone ? ', client gone' : ''}` })),
    el('button', { textContent: 'Release', on: () => post('release', { id: h.id }).catch(say) }))),
    state.holds.length > 1 ? el('button', { textContent: 'Release all', on: () => post('release', { all: true }).catch(say) }) : '');
}
async function drawRules() {
  const { rules } = await api('rules');
  $('rules').replaceChildren(...(rules.length ? rules.map(r => {
    const m = Object.entries(r.match).map(([k, v]) => `${k} ${typeof v === 'object' ? JSON.stringify(v) : v}`).join(', ') || 'everything';
    const a = r.action;
    return el('div', { className: 'item' },
      el('div', {}, el('span', { className: 'mono', textContent: `${a.stage}: ${a.kind}${a.code ? ' ' + a.code : ''}${a.error ? ' ' + a.error : ''}${a.for ? ' ' + a.for : ''}` }),
        el('small', { textContent: `${m}${r.count ? (r.count === 1 ? ', once' : `, ${r.count} times`) : ''} · struck ${r.struck}${r.healed ? ', healed' : ''}` })),
      el('button', { textContent: 'Remove', title: r.id, on: () => api('rules/' + encodeURIComponent(r.id), { method: 'DELETE' }).then(drawRules).catch(say) }));
  }) : [el('p', { className: 'none', textContent: 'None: the server behaves.' })]));
}
function say(e) { $('said').textContent = e instanceof Error ? e.message : String(e); }

async function pick(r) {
  state.picked = r.id;
  draw();
  const d = $('detail');
  d.hidden = false;
  const id = r.key || r.message_id;
  const parts = [el('div', { className: 'item' }, el('h2', { textContent: id || 'row ' + r.id }), el('button', { textContent: 'Close', on: () => { d.hidden = true; state.picked = null; draw(); } }))];
  const story = [...state.rows].reverse().filter(x => id && (x.key || x.message_id) === id);
  parts.push(el('ol', { className: 'story' }, ...(story.length ? story : [r]).map(x => el('li', { className: x.copy > 1 ? 'bad' : x.stored ? 'ok' : '' },
    el('div', { textContent: `${when(x.from)} ${x.client || ''} → ${x.recipient || '?'}` }), marks(x), el('small', { textContent: x.reply_written ? 'told: ' + x.reply : `reached ${x.stage}, told nothing` })))));
  const stored = r.stored ? r : story.find(x => x.stored);
  if (stored) {
    try {
      const m = await api('mails/' + stored.id);
      parts.push(el('dl', { className: 'heads' }, ...m.headers.map(([k, v]) => el('div', {}, el('dt', { textContent: k }), el('dd', { textContent: v })))));
      if (m.problem) parts.push(el('p', { className: 'none', textContent: m.problem }));
      if (m.has_html) parts.push(el('iframe', { sandbox: '', src: `mails/${stored.id}/html`, title: 'mail' }));
      if (m.text) parts.push(el('pre', { textContent: m.text }));
      for (const a of m.attachments) parts.push(el('div', { textContent: `${a.name || 'attachment'} (${a.type}, ${a.size} bytes)` }));
      parts.push(el('a', { href: `mails/${stored.id}/raw`, textContent: 'source' }));
    } catch (e) { parts.push(el('p', { className: 'none', textContent: e.message })); }
  }
  d.replaceChildren(...parts);
}

let statusDue = false;
function refreshSoon() {
  if (statusDue) return;
  statusDue = true;
  setTimeout(() => { statusDue = false; refresh().catch(() => {}); }, 300);
}
async function refresh() {
  const s = await api('status');
  state.running = (await api('ledger?limit=1&since=' + s.totals.rows)).running.reverse();
  draw();
  state.base = { wall: Date.parse(s.wall), now: s.now };
  document.title = 'fake ' + s.name;
  $('name').textContent = 'fake ' + s.name;
  $('where').textContent = s.facts.address;
  $('facts').replaceChildren(...Object.entries({ ...s.facts, seed: s.seed }).map(([k, v]) => el('div', {}, el('dt', { textContent: k }), el('dd', { className: 'mono', textContent: v }))));
  drawTiles(s.totals);
  if (!$('presets').hasChildNodes() && s.presets) {
    $('presets').replaceChildren(...s.presets.map(p => el('button', { textContent: p.name, on: () => { $('rule').value = JSON.stringify(p.rule, null, 2); } })));
    $('rule').value = JSON.stringify(s.presets[0].rule, null, 2);
  }
  await drawRules();
}
function add(row) {
  if (row.copy > 1) state.doubled.add(name(row));
  state.rows.unshift(row);
  state.running = state.running.filter(x => x.id !== row.id);
  if (state.rows.length > KEEP) state.rows.length = KEEP;
  draw();
  refreshSoon();
}
async function start() {
  drawTabs();
  $('q').addEventListener('input', e => { state.q = e.target.value.trim().toLowerCase(); state.limit = SHOW; draw(); });
  $('add').addEventListener('click', async () => {
    try { await api('rules', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: $('rule').value }); say('added'); await drawRules(); } catch (e) { say(e); }
  });
  $('reset').addEventListener('click', () => post('reset', {}).then(() => { state.rows = []; state.doubled.clear(); draw(); refresh(); }).catch(say));
  await refresh();
  const first = await api('ledger?tail=' + KEEP);
  state.rows = first.rows.reverse();
  for (const r of state.rows) if (r.copy > 1) state.doubled.add(name(r));
  draw();
  const params = new URLSearchParams(location.search);
  const want = params.get('row');
  if (want) { const r = state.rows.find(x => String(x.id) === want); if (r) await pick(r); }
  if (params.get('live') === '0') { // a still picture: ?live=0
    state.holds = (await api('holds')).holds;
    drawHolds();
    $('live').textContent = 'still';
    return;
  }
  const es = new EventSource('events?since=' + first.next);
  es.addEventListener('open', () => { $('live').textContent = 'live'; $('live').classList.add('on'); });
  es.addEventListener('error', () => { $('live').textContent = 'reconnecting'; $('live').classList.remove('on'); });
  es.addEventListener('row', e => add(JSON.parse(e.data)));
  es.addEventListener('holds', e => { state.holds = JSON.parse(e.data) || []; drawHolds(); refreshSoon(); });
  es.addEventListener('reset', () => { state.rows = []; state.doubled.clear(); draw(); refreshSoon(); });
}
start().catch(e => { $('live').textContent = e.message; });
