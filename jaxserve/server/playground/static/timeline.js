// The newest steps as lanes: what the host does, what the device executes, what the fence makes row writes wait for.

import { events } from "./server.js";

const NEWEST = 100;
const IDLE_MS = 500; // a longer gap begins a new picture
const LANES = ["host", "device", "fence"];
const ROW = 24, TOP = 4, LEFT = 52, AXIS = 22;
const MODES = { EXTEND: "prefill", DECODE: "decode", TARGET_VERIFY: "verify" };
const ms = (value) => `${value.toFixed(value < 10 ? 2 : 1)} ms`;

export class Timeline {
  #canvas = document.getElementById("lanes");
  #facts = document.getElementById("facts");
  #steps = [];
  #stop = null;
  numSeen = 0;

  constructor() {
    new ResizeObserver(() => this.#draw()).observe(this.#canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  async watch() {
    if (this.#stop) return;
    const stop = (this.#stop = new AbortController());
    try {
      for await (const { steps } of events("/timeline/live", { signal: stop.signal, endless: true })) {
        if (steps.length) this.#add(steps);
      }
    } catch (error) {
      if (error.name !== "AbortError") this.#facts.textContent = error.message;
    } finally {
      if (this.#stop === stop) this.#stop = null;
    }
  }

  unwatch() {
    this.#stop?.abort();
    this.#stop = null;
    this.#steps = [];
  }

  #add(steps) {
    this.numSeen += steps.length;
    this.#steps = [...this.#steps, ...steps].slice(-NEWEST);
    this.#draw();
    const last = this.#steps.at(-1);
    const parts = [`Step ${last.step}`, MODES[last.mode] ?? last.mode, `${last.rows} ${last.rows === 1 ? "row" : "rows"}`];
    if (last.drafted !== null) parts.push(`${last.accepted ?? 0} of ${last.drafted} drafts held`);
    if (last.execution) parts.push(`executed ${ms(last.execution[1] - last.execution[0])}`);
    if (last.fence) parts.push(`fence ${last.fence}`);
    if (last.wait) parts.push(`waited ${ms(last.wait[1] - last.wait[0])}`);
    this.#facts.textContent = parts.join(" · ");
    this.#canvas.setAttribute("aria-label", `The newest ${this.#steps.length} steps. ${parts.join(", ")}`);
    this.#canvas.dataset.steps = this.numSeen;
  }

  #shown(width) {
    const most = Math.max(8, Math.min(NEWEST, Math.floor(width / 22)));
    const shown = [];
    for (const step of this.#steps.slice(-most).reverse()) {
      if (shown.length && shown.at(-1).plan[0] - step.commit[1] > IDLE_MS) break;
      shown.push(step);
    }
    return shown.reverse();
  }

  #draw() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    this.#canvas.width = width * scale;
    this.#canvas.height = height * scale;
    const paint = this.#canvas.getContext("2d");
    paint.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    paint.font = "12px system-ui, sans-serif";
    paint.textBaseline = "middle";
    LANES.forEach((name, i) => {
      paint.fillStyle = colour("soft");
      paint.fillText(name, 0, TOP + i * (ROW + 2) + ROW / 2);
      paint.fillStyle = colour("page");
      paint.fillRect(LEFT, TOP + i * (ROW + 2), width - LEFT, ROW);
    });
    const steps = this.#shown(width - LEFT);
    if (!steps.length) return;
    const times = steps.flatMap((s) => [s.plan, s.launch, s.collect, s.commit, s.execution].filter(Boolean).flat());
    const begin = Math.min(...times), end = Math.max(...times), span = Math.max(end - begin, 0.001);
    const x = (time) => LEFT + ((Math.min(Math.max(time, begin), end) - begin) / span) * (width - LEFT);
    const bar = (lane, between, name, inset = 3) => {
      if (!between) return;
      paint.fillStyle = colour(name);
      const from = x(between[0]), top = TOP + lane * (ROW + 2) + inset;
      paint.fillRect(from, top, Math.max(1, x(between[1]) - from - 0.5), ROW - 2 * inset);
    };
    for (const step of steps) {
      bar(0, step.collect, "collect", 7);
      bar(0, step.plan, "plan");
      bar(0, step.launch, "plan");
      bar(0, step.commit, "commit");
      bar(1, step.execution, MODES[step.mode] ?? "decode");
      if (step.read_done !== null) {
        paint.fillStyle = colour("card");
        paint.fillRect(x(step.read_done), TOP + ROW + 2 + 3, 1.5, ROW - 6);
      }
      if (step.fence) bar(2, step.wait, step.fence.startsWith("fine") ? "fine" : "coarse");
    }
    paint.fillStyle = colour("soft");
    const y = height - AXIS / 2 + 2;
    paint.fillText(`${steps.length} steps`, LEFT, y);
    paint.textAlign = "right";
    paint.fillText(ms(span), width, y);
    paint.textAlign = "left";
  }
}
