// Shows a long answer as plain text: tokens are ranges over some text nodes, coloured by CSS highlights.
// So 32,768 tokens cost no element each, can be selected and copied, and no markup in them means anything.
// Only pieces near the window are painted, again when others come near.

import { el, visible } from "./dom.js";

const CHUNK = 256;
/** Number of tokens in one piece. */
const USED = new Set();

export class TokenText {
  constructor(trace) {
    this.trace = trace;
    this.node = el("div.token-text", { tabindex: 0, "aria-label": "Tokens of the answer" });
    this.places = [];
    this.pieces = [];
    this.firsts = new Map();
    this.near = new Set();
    this.colour = { of: () => null, isDim: () => false };
    this.lay();
    this.seen = new IntersectionObserver((entries) => this.look(entries), { rootMargin: "60%" });
    for (const piece of this.pieces) this.seen.observe(piece.node);
  }

  /** Cuts the text into pieces, also where the weights changed: there a seam is drawn. */
  lay() {
    const { texts, versions } = this.trace;
    let words = "";
    let first = 0;
    let last = null;
    const flush = (until) => {
      if (until === first) return;
      const text = document.createTextNode(words);
      const piece = { node: el("span"), text, first, until };
      piece.node.append(text);
      piece.node.piece = piece;
      this.node.append(piece.node);
      this.pieces.push(piece);
      this.firsts.set(text, piece);
      words = "";
      first = until;
    };
    texts.forEach((token, at) => {
      const version = versions[at];
      if (version >= 0 && last !== null && version !== last) {
        flush(at);
        this.node.append(el("i.seam", { title: `weights changed here: v${last} before, v${version} from here on` }, `v${version}`));
      } else if (at - first >= CHUNK) flush(at);
      if (version >= 0) last = version;
      const shown = visible(token).replace(/\n/g, "↵\n") || "∅";
      this.places.push([words.length, words.length + shown.length]);
      words += shown;
    });
    flush(texts.length);
  }

  look(entries) {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) this.near.add(target.piece);
      else this.near.delete(target.piece);
    }
    this.repaint();
  }

  paint(of, isDim) {
    this.colour = { of, isDim };
    this.repaint();
  }

  repaint() {
    const found = new Map([["masked", []]]);
    const put = (name, text, from, to) => {
      if (!found.has(name)) found.set(name, []);
      found.get(name).push(range(text, this.places[from][0], this.places[to][1]));
    };
    for (const piece of this.near) {
      alike(piece, this.colour.of, put);
      alike(piece, (at) => (this.colour.isDim(at) ? "masked" : null), put);
    }
    for (const name of USED) if (!found.has(name) && name !== "chosen") CSS.highlights.delete(name);
    for (const [name, ranges] of found) set(name, ranges);
  }

  pieceOf(at) {
    return this.pieces.find((piece) => at < piece.until);
  }

  mark(at) {
    set("chosen", at === null ? [] : [range(this.pieceOf(at).text, ...this.places[at])]);
  }

  scrollTo(at) {
    const live = document.createRange();
    live.setStart(this.pieceOf(at).text, this.places[at][0]);
    live.setEnd(this.pieceOf(at).text, this.places[at][1]);
    window.scrollBy({ top: live.getBoundingClientRect().top - window.innerHeight / 3 });
  }

  /** Returns the token under a point, or null. */
  at(x, y) {
    const spot = document.caretPositionFromPoint?.(x, y) ?? legacySpot(x, y);
    const piece = spot && this.firsts.get(spot.offsetNode);
    if (!piece) return null;
    let low = piece.first;
    let high = piece.until - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.places[middle][1] <= spot.offset) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  close() {
    this.seen.disconnect();
    for (const name of USED) CSS.highlights.delete(name);
    USED.clear();
  }
}

function legacySpot(x, y) {
  const found = document.caretRangeFromPoint?.(x, y);
  return found && { offsetNode: found.startContainer, offset: found.startOffset };
}

function range(text, start, end) {
  return new StaticRange({ startContainer: text, startOffset: start, endContainer: text, endOffset: end });
}

/** Joins neighbours of one colour into one range. */
function alike({ text, first, until }, of, put) {
  let name = null;
  let from = first;
  for (let at = first; at <= until; at += 1) {
    const next = at < until ? of(at) : null;
    if (at < until && at > first && next === name) continue;
    if (name !== null) put(name, text, from, at - 1);
    name = next;
    from = at;
  }
}

function set(name, ranges) {
  const highlight = new Highlight();
  for (const one of ranges) highlight.add(one);
  highlight.priority = name === "chosen" ? 2 : name === "masked" ? 1 : 0;
  CSS.highlights.set(name, highlight);
  USED.add(name);
}
