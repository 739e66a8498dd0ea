// The page of one daemon. What comes from it is put in as text, never as markup: ids and names are
// their senders' own words. Lists are drawn as far as they are seen, and only when something changed.

const TIERS = ["dram", "file", "object", "peer", "pool"]
const NAMES = { dram: "DRAM", file: "file", object: "bucket", peer: "peers", pool: "pool", engine: "engine's own", "": "not stored" }
const REQUESTS_MAX = 10000
const NODES_MAX = 60000
const SILENT_MS = 2500 // without a frame, after which the daemon counts as away
const GIVE_UP_MS = 10000 // without a frame, after which the connection is made again
const AGAIN_MS = 500
const ROW = parseFloat(getComputedStyle(document.documentElement).fontSize) * 2 // px, as in the style
const OVERSCAN = 4
const FRESH_S = 8 // of the tree
const PIECES_MAX = 24 // of a prompt's bar

const $ = (query) => document.querySelector(query)
const asText = new Intl.NumberFormat("en", { maximumFractionDigits: 0 })
const tidy = (value, digits = 3) => Number(value.toPrecision(digits))
const count = (value) => (value < 1e5 ? asText.format(value) : value < 1e6 ? tidy(value / 1e3) + " k" : tidy(value / 1e6) + " M")
const share = (part, whole) => (whole ? tidy((100 * part) / whole) + " %" : "–")

const several = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`

function size(nbytes) {
  let unit = 0
  for (; Math.abs(nbytes) >= 1024 && unit < 4; unit++) nbytes /= 1024
  return `${tidy(nbytes)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`
}

function duration(seconds) {
  for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]) if (seconds >= length) return `${tidy(seconds / length)} ${unit}`
  return `${tidy(seconds * 1000)} ms`
}

const age = (at) => {
  const seconds = Math.max(0, now() - at)
  return seconds < 1 ? "now" : duration(Math.floor(seconds))
}

function el(tag, className = "", text = "") {
  const made = document.createElement(tag)
  if (className) made.className = className
  if (text !== "") made.textContent = text
  return made
}

function set(node, text) {
  const only = node.firstChild
  if (only?.nodeType !== Node.TEXT_NODE || only.nextSibling) node.textContent = text
  else if (only.nodeValue !== text) only.nodeValue = text
}

const attribute = (node, name, value) => node.getAttribute(name) !== String(value) && node.setAttribute(name, value)
const width = (node, value) => node.style.width !== value && (node.style.width = value)

// Lets the list `parent` have one child for each item; `make` makes one, `fill` writes into it.
function children(parent, items, make, fill) {
  while (parent.children.length > items.length) parent.lastElementChild.remove()
  items.forEach((item, at) => {
    if (at === parent.children.length) parent.append(make(item))
    fill(parent.children[at], item, at)
  })
}

// ---- what is known ------------------------------------------------------------------------------

const state = { who: null, reasons: {}, status: null, conversations: null, namespaces: [], offset: 0, lastFrame: 0, seenAt: 0, instance: "", error: "", busy: "" }
const samples = { 1: empty(), 10: empty(), 300: empty() }
const SPANS = { 1: [300, 5], 10: [3600, 30], 300: [86400, 600] } // step -> seconds shown, seconds a point
let step = 1
let tenant = new URLSearchParams(location.search).get("tenant") ?? ""

function empty() {
  return { columns: [], index: new Map(), rows: [] }
}

const now = () => Date.now() / 1000 + state.offset // by the daemon's clock

const models = new Map() // namespace -> model

function url(path, query = {}) {
  const asked = new URLSearchParams(Object.entries({ ...query, tenant }).filter(([, value]) => value !== "" && value !== undefined))
  return asked.size ? `${path}?${asked}` : path
}

async function ask(path, query) {
  const reply = await fetch(url(path, query), { signal: AbortSignal.timeout(8000) })
  if (reply.status === 401) location.reload() // the form is there
  const told = await reply.json()
  if (!reply.ok) throw Object.assign(new Error(told.error), { status: reply.status })
  return told
}

// ---- what is drawn, once a frame of the screen ---------------------------------------------------

const DRAW_MS = 3 // of a frame, after which the other panels wait for the next one
const SCROLLED = ["requests", "tree"] // follow the hand: drawn in the frame that they are due in
const dirty = new Set()
const draws = new Map()
let isDue = false

function due(...names) {
  for (const name of names) dirty.add(name)
  if (isDue) return
  isDue = true
  requestAnimationFrame(draw)
}

function draw() {
  const began = performance.now()
  isDue = false
  const names = [...dirty].sort((one, other) => SCROLLED.includes(other) - SCROLLED.includes(one))
  for (const name of names) {
    if (!SCROLLED.includes(name) && performance.now() - began > DRAW_MS) return due(...dirty)
    dirty.delete(name)
    draws.get(name)()
  }
}

// ---- the stream ---------------------------------------------------------------------------------

let stream = null

async function follow() {
  for (;;) {
    stream = new AbortController()
    try {
      const reply = await fetch(url("/api/live"), { signal: stream.signal })
      if (reply.status === 401) return location.reload()
      if (reply.status === 403) return readOnly((await reply.json()).error)
      if (!reply.ok) {
        state.busy = (await reply.json()).error
        due("health")
        await sleep(3000)
        continue
      }
      state.busy = ""
      await frames(reply.body)
    } catch {
      // the daemon is away, or we gave this connection up
    }
    due("health")
    await sleep(AGAIN_MS)
  }
}

async function frames(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ""
  for (;;) {
    const { value, done } = await reader.read()
    if (done) return
    const lines = (rest + value).split("\n")
    rest = lines.pop()
    for (const line of lines) take(JSON.parse(line))
  }
}

function take(frame) {
  state.lastFrame = performance.now()
  state.offset = frame.at - Date.now() / 1000
  state.seenAt = frame.at
  state.error = frame.error
  if (frame.status) {
    const fresh = state.instance !== frame.status.instance
    state.status = frame.status
    const tenants = Object.keys(frame.status.tenants)
    if (!tenant && tenants.length && !tenants.includes("default")) return location.replace(`/?${new URLSearchParams({ tenant: tenants[0] })}`)
    state.instance = frame.status.instance
    if (fresh || frame.missed) reload()
  }
  if (frame.history) keep(1, frame.history)
  if (frame.conversations) state.conversations = frame.conversations
  if (frame.namespaces) {
    state.namespaces = frame.namespaces
    for (const each of frame.namespaces) models.set(each.namespace, each.model)
  }
  if (frame.answered?.length || frame.not_shown) came(frame.answered, frame.not_shown)
  due("health", "kpis", "tiers", "hits", "sessions", "namespaces", "requests")
}

function keep(at, history) {
  const kept = samples[at]
  if (history.columns.join() !== kept.columns.join()) {
    kept.columns = history.columns
    kept.index = new Map(history.columns.map((name, place) => [name, place + 2]))
    kept.rows = []
  }
  const known = new Set(kept.rows.map((row) => row[0]))
  const fresh = history.samples.filter((row) => !known.has(row[0]))
  const inOrder = !kept.rows.length || !fresh.length || fresh[0][0] > kept.rows.at(-1)[0]
  kept.rows.push(...fresh)
  if (!inOrder) kept.rows.sort((one, other) => one[0] - other[0]) // the stream was sooner than the past
  const from = now() - SPANS[at][0] - 10
  while (kept.rows.length && kept.rows[0][0] < from) kept.rows.shift()
}

async function reload() {
  await Promise.allSettled([
    ask("/api/history", { step_s: 1 }).then((found) => keep(1, found)),
    ask("/api/requests", { limit: 1000 }).then(known),
    growTree(),
    longer(),
  ])
  due("kpis", "hits", "requests")
}

async function longer() {
  for (const at of [10, 300]) if (at === step) keep(at, await ask("/api/history", { step_s: at, since: samples[at].rows.at(-1)?.[0] ?? 0 }))
}

const sleep = (ms) => new Promise((done) => setTimeout(done, ms))
const isAway = () => state.lastFrame && performance.now() - state.lastFrame > SILENT_MS

setInterval(() => {
  if (performance.now() - state.lastFrame > GIVE_UP_MS) stream?.abort()
  due("health", "requests")
}, 1000)
setInterval(() => step !== 1 && longer().then(() => due("hits"), () => {}), 10000)

// A reader's credential tells no figures: only how requests were answered.
async function readOnly(why) {
  for (const each of document.querySelectorAll("#kpis, #tiers, #hits, #tree, #sessions, #namespaces")) each.hidden = true
  state.busy = why
  for (;;) {
    try {
      requests.all = []
      known(await ask("/api/requests", { limit: 1000 }))
      state.lastFrame = performance.now()
    } catch (error) {
      state.busy = error.message
    }
    due("health", "requests")
    await sleep(2000)
  }
}

// ---- health -------------------------------------------------------------------------------------

let showsAll = false

draws.set("health", () => {
  const { status } = state
  const pill = $("#health")
  const away = isAway()
  const wrong = status?.findings.filter((each) => each.level === "wrong").length ?? 0
  const notes = status?.findings.filter((each) => each.level === "note").length ?? 0
  const [level, words] = away || state.error ? ["wrong", "away"] : !status ? ["", state.busy ? "limited" : "connecting"] : wrong ? ["wrong", wrong === 1 ? "1 thing is wrong" : `${wrong} things are wrong`] : ["ok", "healthy"]
  pill.className = `pill ${level}`
  set(pill, words)
  const banner = $("#away")
  banner.hidden = !(away || state.error || state.busy)
  // The word for how long is left out of what is read aloud again and again: it is in the title.
  if (!banner.hidden) set(banner, away ? "The daemon does not answer. The figures are the last ones; this page tries again by itself." : state.error || state.busy)
  document.title = away ? "away: kvstore" : wrong ? `(${wrong}) kvstore` : "kvstore"
  if (!status) return
  set($("#about"), `${status.version}, up ${duration(Math.floor(status.uptime_s))}, pid ${status.pid}, ${several(status.blocks, "block")} in ${several(status.namespaces, "namespace")}`)
  set($("#checked"), away ? `last seen ${age(state.seenAt)} ago` : wrong || notes ? `${status.findings.length} checks, ${wrong} wrong, ${notes} to know` : `${status.findings.length} checks, nothing to do`)
  const shown = status.findings.filter((each) => showsAll || each.level !== "ok").sort((one, other) => "wno".indexOf(one.level[0]) - "wno".indexOf(other.level[0]))
  children($("#findings"), shown, () => {
    const item = el("li")
    item.append(el("span", "level"), el("b"), el("span", "found"), el("code", "do"))
    return item
  }, (item, finding) => {
    item.className = finding.level
    const [levelNode, about, found, advice] = item.children
    set(levelNode, finding.level)
    set(about, finding.about)
    set(found, finding.found)
    set(advice, finding.do)
    advice.hidden = !finding.do
  })
})

$("#all-findings").addEventListener("click", (event) => {
  showsAll = !showsAll
  event.target.setAttribute("aria-pressed", showsAll)
  due("health")
})

// ---- key figures --------------------------------------------------------------------------------

const value = (kept, row, name) => row[kept.index.get(name)] ?? 0
const each = (kept, row, head) => TIERS.reduce((sum, tier) => sum + value(kept, row, `${head}.${tier}`), 0)

function lately(seconds) {
  const kept = samples[1]
  const from = now() - seconds
  const rows = kept.rows.filter((row) => row[0] > from)
  return { kept, rows, seconds: rows.reduce((sum, row) => sum + row[1], 0) || 1 }
}

const KPIS = [
  ["Hit ratio, last minute", ({ kept, rows }) => {
    const asked = rows.reduce((sum, row) => sum + value(kept, row, "lookup_blocks"), 0)
    return share(rows.reduce((sum, row) => sum + each(kept, row, "hit_blocks"), 0), asked)
  }, (kept, row) => { const asked = value(kept, row, "lookup_blocks"); return asked ? each(kept, row, "hit_blocks") / asked : null }],
  ["Requests", ({ kept, rows, seconds }) => [count(rows.reduce((sum, row) => sum + value(kept, row, "requests"), 0) / seconds), "/s"], (kept, row) => value(kept, row, "requests") / row[1]],
  ["Tokens served", ({ kept, rows, seconds }) => [count(rows.reduce((sum, row) => sum + each(kept, row, "hit_tokens"), 0) / seconds), "/s"], (kept, row) => each(kept, row, "hit_tokens") / row[1]],
  ["Read from slower tiers", ({ kept, rows, seconds }) => [size(rows.reduce((sum, row) => sum + each(kept, row, "read") - value(kept, row, "read.dram"), 0) / seconds), "/s"], (kept, row) => (each(kept, row, "read") - value(kept, row, "read.dram")) / row[1]],
  ["Stored in DRAM", () => { const { dram } = state.status; return dram ? [share(dram.used_bytes, dram.capacity_bytes), ` of ${size(dram.capacity_bytes)}`] : "–" }, (kept, row) => value(kept, row, "dram.used_bytes")],
  ["Durable lag", () => ("durable_lag_s" in state.status ? duration(state.status.durable_lag_s) : "–"), (kept, row) => value(kept, row, "durable_lag_s")],
]

function svg(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag)
  for (const [name, text] of Object.entries(attributes)) made.setAttribute(name, text)
  return made
}

function makeKpi([title]) {
  const made = el("dl", "kpi")
  made.style.margin = "0"
  const big = el("dd")
  big.append(el("span"), el("small"))
  const line = svg("svg", { viewBox: "0 0 300 26", preserveAspectRatio: "none", "aria-hidden": "true" })
  line.append(svg("path"))
  const wrap = el("div")
  wrap.append(el("dt", "", title), big)
  made.append(wrap)
  const holder = el("div")
  holder.append(line)
  made.append(holder)
  return made
}

draws.set("kpis", () => {
  if (!state.status) return
  const minute = lately(60)
  children($("#kpis"), KPIS, makeKpi, (node, [, words, of]) => {
    const told = words(minute)
    const [big, small] = Array.isArray(told) ? told : [told, ""]
    const dd = node.querySelector("dd")
    set(dd.firstChild, big)
    set(dd.lastChild, small)
    attribute(node.querySelector("path"), "d", spark(of))
  })
})

function spark(of) {
  const kept = samples[1]
  const from = now() - SPANS[1][0]
  const points = kept.rows.map((row) => [row[0] - from, of(kept, row)])
  const most = Math.max(1e-9, ...points.map(([, v]) => v ?? 0))
  let path = ""
  let pen = "M"
  for (const [x, v] of points) {
    if (v === null) { pen = "M"; continue }
    path += `${pen}${x.toFixed(0)} ${(24 - (22 * v) / most).toFixed(1)}`
    pen = "L"
  }
  return path
}

// ---- tiers --------------------------------------------------------------------------------------

function bandwidth(tier) {
  const { kept, rows, seconds } = lately(4)
  const rate = (head) => rows.reduce((sum, row) => sum + value(kept, row, `${head}.${tier}`), 0) / seconds
  return [["read now", size(rate("read")) + "/s"], ["written now", size(rate("written")) + "/s"]]
}

function tierCards() {
  const { status } = state
  if (!status.dram) return []
  const { dram, file, queues } = status
  const cards = [{
    name: "DRAM", tier: "dram", used: dram.used_bytes, cap: dram.capacity_bytes,
    parts: [["t-dram", dram.used_bytes - dram.leased_bytes - dram.pinned_bytes - dram.limbo_bytes], ["t-dram stripe", dram.leased_bytes], ["t-pool", dram.pinned_bytes], ["t-engine", dram.limbo_bytes]],
    facts: [["blocks", count(dram.blocks)], ["leased", `${size(dram.leased_bytes)} of ${size(dram.leased_bytes_max)}`], ["pinned", `${size(dram.pinned_bytes)} of ${size(dram.pinned_bytes_max)}`], ["in limbo", size(dram.limbo_bytes)], ...bandwidth("dram"), ["waiting for room", count(queues.room)], ["evicted", count(dram.evicted_blocks)]],
  }]
  if (file.capacity_bytes) {
    const flows = bandwidth("file")
    cards.push({
      name: "File tier", tier: "file", used: file.physical_bytes, cap: file.capacity_bytes, parts: [["t-file", file.physical_bytes]],
      facts: [["blocks", count(file.blocks)], ...flows, ["to write", `${size(status.dirty_bytes)} of ${size(status.dirty_bytes_max)}`], ["durable lag", duration(status.durable_lag_s)], ["queue", `${count(queues.promote)} reads, ${count(queues.write_behind)} writes`], ["leased", size(file.leased_bytes)], ["evicted", count(file.evicted_blocks)]],
    })
    if (file.devices?.length > 1) for (const device of file.devices) cards.push({ name: device.path, tier: "file", used: device.physical_bytes, cap: file.capacity_bytes / file.devices.length, parts: [["t-file", device.physical_bytes]], facts: [["state", device.state], ["for", duration(device.since_s)]] })
  }
  const { object, pool, fleet } = status
  if (object) cards.push({ name: "Bucket", tier: "object", used: object.physical_bytes, cap: object.capacity_bytes, parts: [["t-object", object.physical_bytes]], facts: [["state", object.state], ["objects", count(object.objects)], ...bandwidth("object"), ["to upload", `${count(object.uploads_waiting)} prefixes`]] })
  if (fleet) cards.push({ name: "Peers", tier: "peer", used: 0, cap: 0, parts: [], facts: [["up", `${fleet.members.filter((member) => member.state === "up").length} of ${fleet.members.length}`], ...bandwidth("peer"), ["links", fleet.secured]] })
  if (pool) cards.push({ name: "Pool", tier: "pool", used: 0, cap: 0, parts: [], facts: [["at", pool.url], ["state", pool.state], ...bandwidth("pool"), ["to put", `${count(pool.puts_waiting)} blocks`], ["given from here", size(pool.segment_bytes)]] })
  return cards
}

function makeTier() {
  const card = el("div", "tier")
  const head = el("h3")
  head.append(el("b"), el("span"))
  const meter = el("div", "meter")
  meter.setAttribute("role", "meter")
  card.append(head, meter, el("dl"))
  return card
}

draws.set("tiers", () => {
  if (!state.status) return
  children($("#tiers .list"), tierCards(), makeTier, (card, tier) => {
    const [head, meter, facts] = card.children
    set(head.firstChild, tier.name)
    set(head.lastChild, tier.cap ? `${size(tier.used)} of ${size(tier.cap)} (${share(tier.used, tier.cap)})` : "")
    meter.hidden = !tier.cap
    attribute(meter, "aria-label", `${tier.name}: used`)
    attribute(meter, "aria-valuenow", tier.cap ? Math.round((100 * tier.used) / tier.cap) : 0)
    children(meter, tier.parts, () => el("i"), (bar, [className, nbytes]) => {
      bar.className = className
      width(bar, `${tier.cap ? Math.max(0, Math.min(100, (100 * nbytes) / tier.cap)).toFixed(2) : 0}%`)
    })
    children(facts, tier.facts, () => { const pair = el("div"); pair.append(el("dt"), el("dd")); return pair }, (pair, [name, text]) => {
      set(pair.firstChild, name)
      set(pair.lastChild, text)
    })
  })
})

function legend(node, items) {
  children(node, items, () => { const item = el("span"); item.append(el("i"), el("span")); return item }, (item, [className, text]) => {
    item.firstChild.className = className
    set(item.lastChild, text)
  })
}

// ---- hit ratio ----------------------------------------------------------------------------------

function points() {
  const kept = samples[step]
  const [span, wide] = SPANS[step]
  const end = Math.ceil(now() / wide) * wide
  const found = Array.from({ length: Math.round(span / wide) }, (_, at) => ({ from: end - span + at * wide, asked: 0, hits: TIERS.map(() => 0) }))
  for (const row of kept.rows) {
    const point = found[Math.floor((row[0] - 1e-6 - (end - span)) / wide)]
    if (!point) continue
    point.asked += value(kept, row, "lookup_blocks")
    TIERS.forEach((tier, at) => (point.hits[at] += value(kept, row, `hit_blocks.${tier}`)))
  }
  return found
}

let shownPoints = []

function makeChart() {
  const chart = $("#plot svg")
  for (const tier of TIERS) chart.append(svg("path", { class: `f-${tier}` }))
  for (const y of [0, 25, 50, 75, 100]) {
    chart.append(svg("line", { class: "grid", x1: 0, x2: 1000, y1: y, y2: y }))
    const label = el("span", "y", `${100 - y} %`)
    label.style.top = `${y}%`
    $("#plot").append(label)
  }
}

draws.set("hits", () => {
  const chart = $("#plot svg")
  shownPoints = points()
  const wide = 1000 / shownPoints.length
  const base = shownPoints.map(() => 0)
  TIERS.forEach((tier, at) => {
    let path = ""
    shownPoints.forEach((point, x) => {
      if (!point.asked || !point.hits[at]) return
      const low = 100 - 100 * base[x]
      base[x] += point.hits[at] / point.asked
      path += `M${(x * wide).toFixed(1)} ${low.toFixed(2)}h${(wide + 0.15).toFixed(2)}V${(100 - 100 * base[x]).toFixed(2)}h-${(wide + 0.15).toFixed(2)}z`
    })
    attribute(chart.children[at], "d", path)
  })
  const kept = samples[step]
  const from = now() - SPANS[step][0]
  const rows = kept.rows.filter((row) => row[0] > from)
  const sum = (name) => rows.reduce((total, row) => total + value(kept, row, name), 0)
  const asked = sum("lookup_blocks")
  const hits = TIERS.map((tier) => sum(`hit_blocks.${tier}`))
  const all = hits.reduce((one, other) => one + other, 0)
  const saved = sum("saved_prefill_s")
  const words = asked ? `${share(all, asked)} of ${count(asked)} blocks asked for${saved ? `; ${duration(saved)} of prefill saved` : ""}` : "nothing was asked for"
  set($("#hit-words"), words)
  attribute(chart, "aria-label", `Hit ratio by tier: ${words}`)
  set($("#x-from"), `${{ 1: "5 min", 10: "1 h", 300: "24 h" }[step]} ago`)
  legend($("#hit-key"), TIERS.map((tier, at) => [`t-${tier}`, `${NAMES[tier]} ${share(hits[at], asked)}`, hits[at]]).filter(([, , blocks], at) => at < 2 || blocks))
  const ended = kept.columns.filter((name) => name.startsWith("ended.")).map((name) => [name.slice(6), sum(name)]).filter(([, times]) => times).sort((one, other) => other[1] - one[1]).slice(0, 8)
  const total = ended.reduce((most, [, times]) => most + times, 0)
  children($("#endings"), ended.length ? ended : [["", 0]], () => {
    const item = el("li")
    const meter = el("div", "meter")
    meter.append(el("i"))
    item.append(el("span"), el("b"), meter)
    return item
  }, (item, [reason, times]) => {
    set(item.children[0], reason ? (reason === "complete" ? "nothing: all was hit" : reason.replaceAll("_", " ")) : "no requests yet")
    set(item.children[1], reason ? `${count(times)}, ${share(times, total)}` : "")
    width(item.querySelector("i"), `${total ? (100 * times) / total : 0}%`)
    attribute(item, "title", state.reasons[reason]?.do ?? "")
  })
})

$("#span").addEventListener("click", (event) => {
  const chosen = event.target.closest("button")
  if (!chosen) return
  step = Number(chosen.dataset.step)
  for (const button of event.currentTarget.children) button.setAttribute("aria-pressed", button === chosen)
  longer().then(() => due("hits"), () => {})
  due("hits")
})

const tip = $("#tip")

function showTip(event, lines) {
  children(tip, lines, () => el("div"), (node, text) => set(node, text))
  tip.hidden = false
  tip.style.left = `${Math.max(8, Math.min(innerWidth - tip.offsetWidth - 12, event.clientX + 14)) + scrollX}px`
  tip.style.top = `${event.clientY + 16 + scrollY}px`
}

const hideTip = () => (tip.hidden = true)

$("#plot").addEventListener("pointermove", (event) => {
  const box = $("#plot svg").getBoundingClientRect()
  const at = Math.floor(((event.clientX - box.left) / box.width) * shownPoints.length)
  const point = shownPoints[at]
  if (!point) return
  $("#cross").hidden = false
  $("#cross").style.left = `${((at + 0.5) / shownPoints.length) * 100}%`
  const served = TIERS.flatMap((tier, place) => (point.hits[place] ? [`${NAMES[tier]} ${share(point.hits[place], point.asked)}`] : []))
  showTip(event, [new Date(point.from * 1000).toLocaleTimeString(), point.asked ? `${count(point.asked)} blocks asked for` : "nothing asked for", ...served])
})
$("#plot").addEventListener("pointerleave", () => { $("#cross").hidden = true; hideTip() })

// ---- a list of which only what is seen is there --------------------------------------------------

class Listed {
  // items: what there is. fill(row, item): write one. act(item): Enter, or a click.
  constructor(node, name, { make, fill, act, keys = () => false }) {
    Object.assign(this, { node, name, make, fill, act, keys, items: [], rows: [], chosen: -1 })
    this.space = node.querySelector(".space")
    // Sizes are read where they change, not where rows are written: that would lay out twice a frame.
    this.top = 0
    this.high = 0
    this.head = 0
    node.addEventListener("scroll", () => { this.top = node.scrollTop; due(name) }, { passive: true })
    node.addEventListener("click", (event) => this.clicked(event))
    node.addEventListener("keydown", (event) => this.pressed(event))
    new ResizeObserver(() => { this.high = node.clientHeight; this.head = this.space.offsetTop; due(name) }).observe(node)
  }

  at(index) {
    return this.items[index]
  }

  draw() {
    const length = this.items.length
    const height = `${length * ROW}px`
    if (this.space.style.height !== height) this.space.style.height = height
    attribute(this.node, "aria-rowcount", length + 1)
    const first = Math.max(0, Math.min(length, Math.floor((this.top - this.head) / ROW)) - OVERSCAN)
    const last = Math.min(length, Math.ceil((this.top + this.high - this.head) / ROW) + OVERSCAN)
    const room = Math.ceil(this.high / ROW) + 2 * OVERSCAN + 1
    while (this.rows.length < room) this.rows.push(this.space.appendChild(this.row()))
    // An item keeps its row for as long as it is seen: to scroll by one writes one row.
    const spare = new Set(this.rows)
    for (let index = first; index < last; index++) {
      const row = this.rows[index % this.rows.length]
      spare.delete(row)
      if (row.hidden) row.hidden = false
      if (row.index !== index) {
        row.index = index
        row.style.transform = `translateY(${index * ROW}px)`
        row.id = `${this.name}-${index}`
        row.setAttribute("aria-rowindex", index + 2)
      }
      attribute(row, "aria-selected", index === this.chosen)
      this.fill(row, this.at(index), index)
    }
    for (const row of spare) if (!row.hidden) row.hidden = true
    if (this.chosen >= first && this.chosen < last) attribute(this.node, "aria-activedescendant", `${this.name}-${this.chosen}`)
    else this.node.removeAttribute("aria-activedescendant")
  }

  row() {
    const row = this.make()
    row.setAttribute("role", "row")
    for (const cell of row.children) cell.setAttribute("role", "gridcell")
    return row
  }

  clicked(event) {
    const row = event.target.closest(".row")
    if (row) this.choose(row.index, event)
  }

  choose(index, event) {
    this.chosen = index
    this.act(this.at(index), index, event)
    due(this.name)
  }

  pressed(event) {
    const page = Math.floor(this.node.clientHeight / ROW) - 2
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }
    if (event.key in moves) this.reveal(Math.max(0, Math.min(this.items.length - 1, Math.max(0, this.chosen) + (this.chosen < 0 ? 0 : moves[event.key]))))
    else if (event.key === "Enter" && this.chosen >= 0) this.choose(this.chosen, event)
    else if (!(this.chosen >= 0 && this.keys(event.key, this.at(this.chosen), this.chosen))) return
    event.preventDefault()
  }

  reveal(index) {
    this.chosen = index
    const top = index * ROW + this.space.offsetTop
    if (top < this.node.scrollTop + this.space.offsetTop) this.node.scrollTop = top - this.space.offsetTop
    else if (top + ROW > this.node.scrollTop + this.node.clientHeight) this.node.scrollTop = top + ROW - this.node.clientHeight
    due(this.name)
  }
}

// ---- requests -----------------------------------------------------------------------------------

const requests = { all: [], not: 0, paused: false, filter: "", kind: "" } // oldest first

// What is remembered, between what came by itself: the two tell of the same requests, and their times
// differ by as long as an answer took.
function known(told) {
  const times = new Map(requests.all.map((request) => [`${request.id} ${request.client}`, request.at]))
  const fresh = told.filter((request) => Math.abs((times.get(`${request.id} ${request.client}`) ?? -1e9) - request.at) > 0.5)
  if (!fresh.length) return
  requests.all = requests.all.concat(fresh).sort((one, other) => one.at - other.at).slice(-REQUESTS_MAX)
  filterRequests()
}

function came(list, not) {
  requests.not += not
  if (!list.length) return
  requests.all.push(...list)
  if (requests.all.length > REQUESTS_MAX + 500) requests.all = requests.all.slice(-REQUESTS_MAX)
  if (!requests.paused) filterRequests()
}

function filterRequests() {
  const { filter, kind } = requests
  const meant = (request) =>
    (!kind || (kind === "miss" ? request.kind === "acquire" && request.hit < request.asked : request.kind === kind)) &&
    (!filter || request.id.includes(filter) || request.client.includes(filter) || (request.conversation ?? "").includes(filter))
  const before = list.items.length ? list.at(list.chosen) : undefined
  const top = list.node.scrollTop > ROW ? list.at(Math.floor(list.node.scrollTop / ROW)) : undefined
  const offset = list.node.scrollTop % ROW
  list.items = filter || kind ? requests.all.filter(meant) : requests.all
  if (before) list.chosen = list.place(before)
  if (top && list.place(top) >= 0) list.node.scrollTop = list.place(top) * ROW + offset // what is read stays where it is
  due("requests")
}

const list = new Listed($("#request-list"), "requests", {
  make() {
    const row = el("div", "row r-cols")
    row.append(el("span", "dim"), el("span", "mono"), el("span", "dim"), el("div", "cell"), el("span", "num"), el("span", "num dim"), el("span"))
    row.children[3].append(el("div", "prompt"))
    row.children[3].firstChild.setAttribute("role", "img")
    return row
  },
  fill(row, request) {
    const [when, id, client, bar, hit, took, ended] = row.children
    set(when, age(request.at))
    if (row.of === request) return
    row.of = request
    set(id, request.id || "(without an id)")
    set(client, request.client || "unnamed")
    fillPrompt(bar.firstChild, request)
    const save = request.kind === "save"
    set(hit, save ? size(request.nbytes) : request.asked > request.own ? share(request.hit - request.own, request.asked - request.own) : "–")
    set(took, duration(request.took_s))
    set(ended, save ? saveWords(request) : request.ended ? request.ended.reason.replaceAll("_", " ") : "complete")
  },
  act: explain,
})
list.at = (index) => list.items[list.items.length - 1 - index] // newest first
list.place = (request) => { const at = list.items.lastIndexOf(request); return at < 0 ? -1 : list.items.length - 1 - at }
draws.set("requests", () => {
  list.draw()
  const shown = list.items.length
  const bounded = requests.not ? `; ${count(requests.not)} more came too fast to be listed` : ""
  set($("#request-words"), `${count(shown)} of the last ${count(requests.all.length)}${requests.paused ? ", paused" : ""}${bounded}`)
})

const saveWords = (request) => (request.refused ? `saved, ${request.refused} refused` : request.stored ? "saved" : "was stored before")

function fillPrompt(bar, request) {
  bar.className = request.kind === "save" ? "prompt save" : "prompt"
  const pieces = request.kind === "save" ? [] : merged(request.ranges)
  bar.style.backgroundImage = stripes(pieces, Math.max(1, request.asked))
  const words = request.kind === "save" ? `saved from block ${request.first_block}: ${request.stored} records` : pieces.map(([begin, end, tier]) => `blocks ${begin} to ${end - 1}: ${NAMES[tier]}`).join(", ")
  attribute(bar, "title", words || "no blocks")
}

// The pieces of a bar are one picture, not an element each: rows are written while they are scrolled.
function stripes(pieces, whole) {
  if (!pieces.length) return "none"
  const percent = (blocks) => `${tidy((100 * blocks) / whole, 4)}%`
  const stops = pieces.map(([begin, end, tier]) => {
    const colour = `var(--${tier || "miss"})`
    const gap = end === whole ? "" : `,var(--card) calc(${percent(end)} - 1px) ${percent(end)}`
    return `${colour} ${percent(begin)} ${end === whole ? percent(end) : `calc(${percent(end)} - 1px)`}${gap}`
  })
  return `linear-gradient(90deg,${stops})`
}

// A prompt of many short ranges is shown as fewer: the shortest are joined to the ones before them.
function merged(ranges) {
  if (ranges.length <= PIECES_MAX) return ranges
  const least = [...ranges].map(([begin, end]) => end - begin).sort((one, other) => other - one)[PIECES_MAX - 1]
  const found = []
  for (const [begin, end, tier] of ranges) {
    if (found.length && (end - begin < least || found.at(-1)[2] === tier || found.length === PIECES_MAX)) found.at(-1)[1] = end
    else found.push([begin, end, tier])
  }
  return found
}

function explain(request) {
  const box = $("#why")
  $("#requests").classList.add("open")
  box.hidden = false
  const head = el("div", "head")
  const close = el("button", "plain", "Close")
  close.type = "button"
  close.addEventListener("click", closeWhy)
  head.append(el("h3", "mono", request.id || "a request without an id"), close)
  const bar = el("div")
  bar.setAttribute("role", "img")
  fillPrompt(bar, request)
  const parts = [head, el("p", "dim", `${new Date(request.at * 1000).toLocaleTimeString()}, from ${request.client || "a client without a name"}${request.asks > 1 ? `, asked ${request.asks} times` : ""}${request.conversation ? `, conversation ${request.conversation}` : ""}`), bar, ...explained(request)]
  const model = models.get(request.namespace)
  parts.push(el("p", "dim", `${model ? `${model}, ` : ""}namespace ${request.namespace.slice(0, 12)}`))
  if (request.last_key) {
    const show = el("button", "plain", "Show it among the prefixes")
    show.type = "button"
    show.addEventListener("click", () => { $("#tree").scrollIntoView({ behavior: "smooth" }); throughTree(request.last_key) })
    parts.push(show)
  }
  box.replaceChildren(...parts)
}

function explained(request) {
  if (request.kind === "save") return [el("p", "", `saved ${request.stored} records, ${size(request.nbytes)}, from block ${request.first_block} on, in ${duration(request.took_s)}; ${request.existing} were there already, ${request.refused} were refused`)]
  const asked = request.asked - request.own
  const hit = request.hit - request.own
  const tokens = request.block_tokens ? `, ${count(hit * request.block_tokens)} tokens` : ""
  const from = {}
  for (const [begin, end, tier] of request.ranges) if (tier && tier !== "engine") from[tier] = (from[tier] ?? 0) + end - begin
  const parts = [el("p", "", `hit ${hit} of ${asked} blocks${request.own ? ` beyond the engine's own ${request.own}` : ""} (${share(hit, asked)}${tokens}), in ${duration(request.took_s)}`), el("p", "dim", Object.entries(from).map(([tier, blocks]) => `${blocks} from ${NAMES[tier]}`).join(", ") || "nothing of it is stored")]
  const ended = request.ended
  if (ended) {
    const told = state.reasons[ended.reason]
    parts.push(el("p", "", `ended at block ${ended.block}${ended.group ? ` (KV cache group ${ended.group})` : ""}: ${(told?.text ?? ended.reason).replace("{left}", duration(ended.left_s))}`))
    if (told?.do) parts.push(el("p", "do", `what to do: ${told.do}`))
    if (ended.differs.length) {
      const items = el("ul")
      items.append(...ended.differs.map((field) => el("li", "mono", field)))
      parts.push(items)
    }
  } else parts.push(el("p", "", "nothing ended it: all was hit"))
  if (request.base) parts.push(el("p", "", `${request.base} of these blocks came without their fine part`))
  if (request.lease === "expired") parts.push(el("p", "", "its lease had expired when it was released: the engine computed it"))
  return parts
}

function closeWhy() {
  $("#why").hidden = true
  $("#requests").classList.remove("open")
  list.chosen = -1
  list.node.focus()
  due("requests")
}

$("#request-filter").addEventListener("input", (event) => { requests.filter = event.target.value; list.node.scrollTop = 0; filterRequests() })
$("#request-kind").addEventListener("change", (event) => { requests.kind = event.target.value; list.node.scrollTop = 0; filterRequests() })
$("#pause").addEventListener("click", (event) => {
  requests.paused = !requests.paused
  list.items = requests.paused ? [...list.items] : list.items
  event.target.setAttribute("aria-pressed", requests.paused)
  set(event.target, requests.paused ? "Go on" : "Pause")
  if (!requests.paused) filterRequests()
  due("requests")
})
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("#why").hidden) closeWhy()
  else if (event.key === "/" && !/INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) { event.preventDefault(); $("#request-filter").focus() }
})

// ---- the tree of prefixes -----------------------------------------------------------------------

const tree = { drawn: 0, roots: [], spaces: [], count: 0, told: null, search: null, most: 1, target: "", note: "", busy: false }

const bytesOf = (run) => run.allDram + run.allFile
const isWhole = (run) => run.kids !== null && run.kids.length >= run.children

function asRun(told, spaces, parent) {
  return { parent, depth: parent ? parent.depth + 1 : 0, first: told.first_key.slice(0, 24), key: told.last_key, space: spaces[told.namespace] ?? "", begin: told.begin, end: told.end, children: told.children, dram: told.dram_bytes, file: told.file_bytes, allDram: told.all_dram_bytes, allFile: told.all_file_bytes, blocks: told.blocks, hits: told.hits, used: told.used_age_s === null ? null : now() - told.used_age_s, kids: told.children ? null : [], open: false, next: "" }
}

// Puts what an answer has below `parent`, or as roots, and returns the first level of it.
function attach(reply, parent) {
  const made = []
  const top = []
  for (const told of reply.runs) {
    const over = told.parent ? made[told.parent - 1] : parent
    const run = asRun(told, reply.namespaces, over)
    made.push(run)
    if (told.parent) (over.kids ??= []).push(run)
    else top.push(run)
  }
  tree.count += made.length
  return top
}

async function growTree() {
  if (tree.busy || tree.search) return
  tree.busy = true
  try {
    const reply = await ask("/api/tree", { depth: 6, limit: 400 })
    const before = new Map(tree.roots.map((run) => [run.first, run]))
    tree.count = 0
    tree.told = reply
    tree.roots = attach(reply, null)
    tree.next = reply.next
    if (reply.age_s > FRESH_S) setTimeout(growTree, 1500) // nobody had asked for a while: it is drawn now
    for (const run of tree.roots) adopt(run, before.get(run.first))
    tree.note = ""
  } catch (error) {
    tree.note = error.message
  } finally {
    tree.busy = false
    flatten()
  }
}

// What was open stays open; what was fetched of it is kept until it is asked for again.
function adopt(run, before) {
  if (!before) return
  run.open = before.open
  if (before.kids && (!run.kids || before.kids.length > run.kids.length) && before.blocks === run.blocks) {
    run.kids = before.kids
    run.next = before.next
    for (const kid of run.kids) kid.parent = run
    tree.count += before.kids.length
    return
  }
  const known = new Map((before.kids ?? []).map((kid) => [kid.first, kid]))
  for (const kid of run.kids ?? []) adopt(kid, known.get(kid.first))
  if (run.open && !run.kids) fetchKids(run).then(flatten, () => {})
}

async function fetchKids(run, limit = 200) {
  const reply = await ask("/api/tree", { prefix: run.key, namespace: run.space, depth: 1, limit, cursor: run.next })
  const found = attach(reply, run)
  run.kids = run.next ? [...run.kids, ...found] : found
  run.next = reply.next
  if (!reply.next) run.children = run.kids.length
}

function flatten() {
  tree.drawn++
  const rows = []
  const walk = (runs) => {
    for (const run of runs) {
      rows.push(run)
      if (!run.open || !run.kids) continue
      walk(run.kids)
      if (run.next) rows.push({ more: run, depth: run.depth + 1 })
    }
  }
  walk(tree.roots)
  if (tree.next && !tree.search) rows.push({ more: null, depth: 0 })
  const chosen = runs.items[runs.chosen]
  runs.items = rows
  if (chosen) runs.chosen = rows.findIndex((run) => run === chosen || (run.first && run.first === chosen.first && run.begin === chosen.begin))
  tree.most = tree.roots.reduce((most, run) => Math.max(most, bytesOf(run)), 1)
  due("tree", "icicle")
}

const runs = new Listed($("#tree-list"), "tree", {
  make() {
    const row = el("div", "row t-cols")
    row.append(el("span"), el("div"), el("span", "num"), el("span", "num"), el("span", "num"), el("span", "num dim"))
    const twist = el("span", "twist")
    twist.setAttribute("aria-hidden", "true")
    row.children[0].append(twist, el("span"), el("span", "dim"))
    const bar = el("div", "run")
    bar.append(el("i", "t-dram"), el("i", "t-file"))
    row.children[1].append(bar)
    return row
  },
  fill(row, run) {
    if (row.of === run && row.drawn === tree.drawn && !("more" in run)) return set(row.children[5], run.used === null ? "–" : age(run.used))
    row.of = run
    row.drawn = tree.drawn
    const [name, bar, bytes, blocks, hits, used] = row.children
    name.style.paddingLeft = `${Math.min(run.depth, 12) * 14}px`
    attribute(row, "aria-level", run.depth + 1)
    if ("more" in run) {
      for (const cell of [bytes, blocks, hits, used]) set(cell, "")
      bar.hidden = true
      row.removeAttribute("aria-expanded")
      set(name.children[0], "")
      set(name.children[1], "more of them: Enter shows them")
      set(name.children[2], "")
      return
    }
    bar.hidden = false
    set(name.children[0], run.children ? (run.open ? "▾" : "▸") : "·")
    set(name.children[1], run.end === run.begin + 1 ? `block ${run.begin}` : `blocks ${run.begin}–${run.end - 1}`)
    set(name.children[2], run.depth ? `  ${run.first.slice(0, 8)}` : `  ${models.get(run.space) ?? run.space.slice(0, 8)}`)
    if (run.children) attribute(row, "aria-expanded", run.open)
    else row.removeAttribute("aria-expanded")
    const all = bytesOf(run)
    width(bar.firstChild, `${Math.max(0.4, (100 * all) / tree.most).toFixed(2)}%`)
    bar.firstChild.style.height = run.key === tree.target ? "18px" : ""
    width(bar.firstChild.children[0], `${all ? (100 * run.allDram) / all : 0}%`)
    width(bar.firstChild.children[1], `${all ? (100 * run.allFile) / all : 0}%`)
    attribute(bar, "title", `${size(run.allDram)} in DRAM, ${size(run.allFile)} in the file tier`)
    set(bytes, size(all))
    set(blocks, count(run.blocks))
    set(hits, count(run.hits))
    set(used, run.used === null ? "–" : age(run.used))
  },
  act: toggle,
  keys(key, run, index) {
    if ("more" in run) return false
    if (key === "ArrowRight" && run.children && !run.open) toggle(run)
    else if (key === "ArrowLeft" && run.open) toggle(run)
    else if (key === "ArrowLeft" && run.parent) runs.reveal(runs.items.lastIndexOf(run.parent, index))
    else return false
    return true
  },
})

async function toggle(run) {
  try {
    if ("more" in run) {
      if (run.more) await fetchKids(run.more)
      else {
        const reply = await ask("/api/tree", { depth: 1, limit: 200, cursor: tree.next })
        tree.roots.push(...attach(reply, null))
        tree.next = reply.next
      }
    } else if (run.children) {
      run.open = !run.open
      if (run.open && !isWhole(run)) await fetchKids(Object.assign(run, { kids: null, next: "" }))
    }
  } catch (error) {
    tree.note = error.message
  }
  flatten()
}

draws.set("tree", () => {
  runs.draw()
  const told = tree.told
  const left = told?.left_out_blocks ? `; ${count(told.left_out_blocks)} more blocks are stored than a tree is drawn of` : ""
  const drawn = told ? `${count(told.blocks)} blocks, ${count(tree.count)} runs shown, drawn ${duration(Math.max(1, Math.floor(told.age_s)))} ago${left}` : "no tree yet"
  set($("#tree-words"), tree.note || (tree.search ? `${tree.search}: Find with nothing in the field shows all` : drawn))
})

// The same from above: each level of the tree is a row, its width the bytes behind it.
const LEVEL = 22
const LEVELS_MAX = 8
let rectangles = []

draws.set("icicle", () => {
  const canvas = $("#icicle")
  const scale = Math.min(devicePixelRatio || 1, 2)
  canvas.style.height = `${LEVEL * Math.max(1, levels(tree.roots, 1)) + 4}px`
  const [wide, high] = [canvas.clientWidth, canvas.clientHeight]
  canvas.width = Math.round(wide * scale)
  canvas.height = Math.round(high * scale)
  const pen = canvas.getContext("2d")
  pen.scale(scale, scale)
  const style = getComputedStyle(document.documentElement)
  const colour = (name) => style.getPropertyValue(`--${name}`)
  const paint = { dram: colour("dram"), file: colour("file"), card: colour("card"), text: colour("text"), accent: colour("accent") }
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`
  rectangles = []
  const lay = (list, from, room, whole, level) => {
    if (level * LEVEL >= high) return
    let x = from
    for (const run of list) {
      const w = (room * bytesOf(run)) / whole
      if (w < 0.7) break // the others are smaller
      paintRun(pen, paint, run, x, level * LEVEL, w)
      rectangles.push({ run, x, y: level * LEVEL, w })
      if (run.kids?.length && w > 2) lay(run.kids, x, w, bytesOf(run) || 1, level + 1)
      x += w
    }
  }
  lay(tree.roots, 0, wide, tree.roots.reduce((sum, run) => sum + bytesOf(run), 0) || 1, 0)
})

function levels(list, level) {
  if (level === LEVELS_MAX) return level
  return list.reduce((most, run) => (run.kids?.length && most < LEVELS_MAX ? Math.max(most, levels(run.kids, level + 1)) : most), list.length ? level : level - 1)
}

function paintRun(pen, paint, run, x, y, w) {
  const own = run.dram + run.file
  const inDram = own ? run.dram / own : 0
  const since = run.used === null ? 3600 : Math.max(0, now() - run.used)
  pen.globalAlpha = Math.max(0.55, 1 - Math.log10(1 + since) / 8) // what was used lately is strong
  const gap = w > 3 ? 1 : 0
  pen.fillStyle = paint.file
  pen.fillRect(x, y, w - gap, LEVEL - 1)
  pen.fillStyle = paint.dram
  pen.fillRect(x, y, (w - gap) * inDram, LEVEL - 1)
  pen.globalAlpha = 1
  if (run.key === tree.target) { pen.strokeStyle = paint.text; pen.lineWidth = 2; pen.strokeRect(x + 1, y + 1, w - gap - 2, LEVEL - 3) }
  if (w < 64) return
  pen.save()
  pen.fillStyle = "#fff"
  pen.shadowColor = "#000c"
  pen.shadowBlur = 3
  pen.beginPath()
  pen.rect(x, y, w - 6, LEVEL)
  pen.clip()
  pen.fillText(`${run.begin}–${run.end - 1}  ${size(bytesOf(run))}${run.hits ? `  ${count(run.hits)} hits` : ""}`, x + 6, y + 15)
  pen.restore()
}

const runUnder = (event) => rectangles.findLast(({ x, y, w }) => event.offsetX >= x && event.offsetX < x + w && event.offsetY >= y && event.offsetY < y + LEVEL)?.run

$("#icicle").addEventListener("pointermove", (event) => {
  const run = runUnder(event)
  if (!run) return hideTip()
  showTip(event, [`blocks ${run.begin} to ${run.end - 1}`, `${size(bytesOf(run))} with all behind it, ${count(run.blocks)} blocks`, `of its own ${size(run.dram)} in DRAM, ${size(run.file)} in the file tier`, `${count(run.hits)} hits, last used ${run.used === null ? "not yet" : `${age(run.used)} ago`}`])
})
$("#icicle").addEventListener("pointerleave", hideTip)
$("#icicle").addEventListener("click", (event) => { const run = runUnder(event); if (run) show(run) })
new ResizeObserver(() => due("icicle")).observe($("#icicle"))

function show(run) {
  for (let over = run.parent; over; over = over.parent) over.open = true
  flatten()
  runs.reveal(runs.items.indexOf(run))
}

async function throughTree(key) {
  if (!key) return
  const reply = await ask("/api/tree", { through: key, limit: 200 }).catch((error) => { tree.note = error.message; due("tree") })
  if (!reply) return
  tree.note = reply.runs.length ? "" : "its last block is not stored; blocks before that may be"
  tree.search = `the way to block ${key.slice(0, 8)}`
  tree.count = 0
  tree.told = reply
  tree.roots = attach(reply, null)
  const open = (list) => list.forEach((run) => { if (run.kids?.length) { run.open = true; open(run.kids) } tree.target = run.key === key || !run.kids?.length ? run.key : tree.target })
  open(tree.roots)
  flatten()
}

$("#tree-search").addEventListener("submit", async (event) => {
  event.preventDefault()
  const what = $("#tree-what").value.trim()
  tree.search = null
  tree.target = ""
  tree.note = ""
  if (!what) return growTree()
  try {
    if ($("#tree-by").value === "request") {
      const found = await ask("/api/requests", { id: what, limit: 1 })
      if (!found.length) throw new Error(`no request ${what} is remembered`)
      await throughTree(found[0].last_key)
    } else if ($("#tree-by").value === "conversation") {
      const found = (await ask("/api/conversations", { id: what, limit: 1 })).items
      if (!found.length) throw new Error(`no conversation ${what} is known`)
      await throughTree(found[0].last_key)
    } else {
      const space = state.namespaces.find((each) => each.namespace.startsWith(what) || each.model === what)
      if (!space) throw new Error(`there is no namespace ${what}`)
      tree.search = `namespace ${space.namespace.slice(0, 12)}`
      tree.count = 0
      tree.told = await ask("/api/tree", { namespace: space.namespace, depth: 6, limit: 400 })
      tree.roots = attach(tree.told, null)
      flatten()
    }
  } catch (error) {
    tree.note = error.message
    due("tree")
  }
})

$("#tree-all").addEventListener("click", async (event) => {
  event.target.disabled = true
  tree.busy = true
  try {
    await fetchAll()
  } catch (error) {
    tree.note = error.message
  } finally {
    tree.busy = false
    tree.expanded = true
    event.target.disabled = false
    flatten()
  }
})

// Fetches level by level, the largest first, until all is there or the page has as much as it may.
async function fetchAll() {
  while (tree.next && !tree.search && tree.count < NODES_MAX) {
    const reply = await ask("/api/tree", { depth: 1, limit: 1000, cursor: tree.next })
    tree.roots.push(...attach(reply, null))
    tree.next = reply.next
    flatten()
  }
  let level = tree.roots
  while (level.length) {
    for (const run of level) {
      if (!run.children) continue
      run.open = true
      if (!isWhole(run)) Object.assign(run, { kids: null, next: "" })
      while (!isWhole(run) && tree.count < NODES_MAX) {
        await fetchKids(run, 1000)
        flatten()
        if (!run.next) break
      }
    }
    if (tree.count >= NODES_MAX) tree.note = `${count(tree.count)} runs are shown, which is all that fit here`
    level = level.flatMap((run) => run.kids ?? [])
  }
}

setInterval(() => { if (!document.hidden && !tree.expanded && !isAway()) growTree() }, 5000)

// ---- sessions and conversations ------------------------------------------------------------------

function cells(classNames) {
  return () => {
    const row = el("tr")
    for (const className of classNames) row.append(el("td", className))
    return row
  }
}

function filled(node, items, classNames, write, otherwise) {
  children(node, items.length ? items : [null], (item) => (item ? cells(classNames)() : el("tr")), (row, item) => {
    if (item && row.children.length !== classNames.length) row.replaceChildren(...cells(classNames)().children)
    if (item) return write(row.children, item)
    if (row.children.length === 1 && row.firstChild.colSpan > 1) return
    const cell = el("td", "none", otherwise)
    cell.colSpan = classNames.length
    row.replaceChildren(cell)
  })
}

function tags(node, items) {
  children(node, items, () => el("span", "tag"), (tag, [className, text]) => {
    tag.className = `tag ${className}`
    set(tag, text)
  })
}

draws.set("sessions", () => {
  const { status, conversations } = state
  if (!status) return
  set($("#session-words"), `${several(status.sessions ?? 0, "session")}, ${several(status.leases ?? 0, "lease")}`)
  filled($("#engines"), status.clients ?? [], ["mono", "num", "num", "num"], ([name, processes, leases, limbo], client) => {
    set(name, client.name || "unnamed")
    set(processes, count(client.processes))
    set(leases, count(client.leases))
    set(limbo, client.limbo_bytes ? size(client.limbo_bytes) : "–")
  }, "No engine is connected: point one at this daemon's socket.")
  if (!conversations) return
  set($("#conversation-words"), `Conversations: ${count(conversations.known)} known${conversations.known > conversations.items.length ? `, the last ${count(conversations.items.length)} are listed` : ""}`)
  filled($("#conversations"), conversations.items, ["mono", "num", "num dim", ""], ([id, blocks, last, hints], item) => {
    set(id, item.id || `a prefix, ${item.last_key.slice(0, 8)}`)
    set(blocks, count(item.blocks))
    set(last, duration(Math.floor(item.age_s + 1)))
    const told = []
    if (item.ended) told.push(["", "ended"])
    if (item.expected_in_s) told.push(["soon", `expected in ${duration(Math.ceil(item.expected_in_s))}`])
    if (item.pinned_s) told.push(["pin", `pinned for ${duration(Math.ceil(item.pinned_s))}${item.pin_bytes_max ? `, at most ${size(item.pin_bytes_max)}` : ""}`])
    tags(hints, told)
  }, "No request has named a conversation yet.")
})

// ---- namespaces and tenants ----------------------------------------------------------------------

draws.set("namespaces", () => {
  const { namespaces, status } = state
  const sorted = [...namespaces].sort((one, other) => other.blocks - one.blocks).slice(0, 100)
  set($("#namespace-words"), namespaces.length > 100 ? `the 100 largest of ${count(namespaces.length)}` : "")
  filled($("#spaces"), sorted, ["", "mono dim", "num", "num", "num", "num"], ([model, id, blocks, dram, file, hits], space) => {
    const lines = [space.model || "unknown", ...space.differs]
    children(model, lines, () => el("div"), (line, text, at) => {
      line.className = at ? "dim mono" : ""
      set(line, text)
    })
    set(id, space.namespace.slice(0, 12))
    set(blocks, count(space.blocks))
    set(dram, size(space.dram_bytes))
    set(file, size(space.file_bytes))
    set(hits, share(space.hit_blocks, space.asked_blocks))
  }, "No engine has told of a model yet.")
  const tenants = Object.entries(status?.tenants ?? {})
  $("#tenants").hidden = !tenants.length
  filled($("#tenant-rows"), tenants.slice(0, 100), ["", "num", "num", "num", "num"], ([name, dram, guaranteed, file, blocks], [id, told]) => {
    set(name, id)
    set(dram, told.share.dram ? size(told.share.dram.used_bytes) : "–")
    set(guaranteed, told.share.dram ? size(told.share.dram.guaranteed_bytes) : "–")
    set(file, told.share.file ? size(told.share.file.used_bytes) : "–")
    set(blocks, count(told.blocks))
  }, "")
  chooseTenant(tenants.map(([name]) => name))
})

function chooseTenant(names) {
  $("#tenant-label").hidden = names.length < 2
  children($("#tenant"), names, () => el("option"), (option, name) => {
    set(option, name)
    option.value = name
    option.selected = name === (tenant || state.who?.tenant)
  })
}

$("#tenant").addEventListener("change", (event) => location.assign(`/?${new URLSearchParams({ tenant: event.target.value })}`))

// ---- light and dark ------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)")
const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark"

function theme(chosen) {
  if (chosen) {
    document.documentElement.dataset.theme = chosen
    try { localStorage.setItem("theme", chosen) } catch { /* a browser that keeps nothing */ }
  }
  set($("#theme"), isDark() ? "Light" : "Dark")
  due("icicle")
}

$("#theme").addEventListener("click", () => theme(isDark() ? "light" : "dark"))
dark.addEventListener("change", () => theme())

// ---- the start -----------------------------------------------------------------------------------

async function start() {
  makeChart()
  const legends = ["dram", "file", "object", "peer", "pool"]
  legend($("#tier-key"), [["t-dram", "DRAM"], ["t-dram stripe", "leased"], ["t-pool", "pinned"], ["t-engine", "in limbo"], ["t-file", "file tier"]])
  legend($("#request-key"), [["t-engine", "the engine's own"], ...legends.map((tier) => [`t-${tier}`, NAMES[tier]]), ["t-miss", "not stored"]])
  try { theme(localStorage.getItem("theme")) } catch { theme() }
  follow()
  for (;;) {
    try {
      state.who = await ask("/api/who")
      break
    } catch {
      await sleep(1000)
    }
  }
  state.reasons = state.who.reasons
  set($("#who"), `${state.who.name}, ${state.who.role}`)
}

start()
