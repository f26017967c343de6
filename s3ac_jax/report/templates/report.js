"use strict";
// Text of models and runs enters the page through textContent only, never as HTML.
(() => {
  const WINDOW = 2000; // tokens in the DOM at a time
  const MARGIN = 200; // how near to its edge the cursor moves it
  const POINTS = 900; // of the value curve
  const SVG = "http://www.w3.org/2000/svg";

  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "class") node.className = value;
      else if (name === "text") node.textContent = value;
      else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  };
  const draw = (tag, attributes, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const known = (x) => typeof x === "number" && Number.isFinite(x);
  const told = (x, digits = 3) => (known(x) ? x.toFixed(digits).replace("-", "−") : "not measured");
  const signed = (x) => (x > 0 ? "+" : "") + told(x, 2);
  const visible = (piece) => (piece === "" ? "∅" : piece.replace(/\r?\n/g, "⏎\n").replace(/\t/g, "⇥\t"));
  const short = (piece) => (piece === "" ? "∅" : piece.replace(/\n/g, "⏎").replace(/ /g, "␣"));
  const words = (name) => name.replace(/_/g, " ");

  const theme = document.getElementById("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const showTheme = () => {
    const dark = chosen === null ? prefersDark.matches : chosen;
    document.documentElement.style.colorScheme = dark ? "dark" : "light";
    theme.setAttribute("aria-pressed", String(dark));
  };
  theme.addEventListener("click", () => {
    chosen = theme.getAttribute("aria-pressed") !== "true";
    showTheme();
  });
  prefersDark.addEventListener("change", showTheme);
  showTheme();

  class Viewer {
    constructor(root, responses, prefix) {
      Object.assign(this, { root, responses, prefix, colour: "value", cursor: 0, shown: [] });
      this.build();
      this.setColour(responses.some((one) => one.value) ? "value" : "advantage");
      this.filter();
    }

    build() {
      const { prefix } = this;
      this.verdict = make("select", {}, ...["all", "right", "wrong"].map((v) => make("option", { value: v, text: v })));
      const ticks = [...new Set(this.responses.map((one) => one.tick))];
      this.tick = make("select", {}, make("option", { value: "", text: "all" }));
      for (const tick of ticks) this.tick.append(make("option", { value: tick, text: tick }));
      this.list = make("div", { class: "list", role: "listbox", tabindex: "0", "aria-label": "Responses" });
      const pick = make("div", { class: "pick" },
        make("label", {}, "Outcome", this.verdict), make("label", {}, "Tick", this.tick), this.list);
      for (const select of [this.verdict, this.tick]) select.addEventListener("change", () => this.filter());
      this.list.addEventListener("click", (event) => {
        const option = event.target.closest("[data-place]");
        if (option) this.open(Number(option.dataset.place));
      });

      this.outcome = make("div", { role: "status" });
      this.toggles = ["value", "advantage"].map((kind) => {
        const button = make("button", { type: "button", "data-colour": kind, text: kind === "value" ? "value V" : "advantage" });
        button.addEventListener("click", () => this.setColour(kind));
        return button;
      });
      this.key = make("div", { class: "key" });
      const head = make("div", { class: "head" }, this.outcome,
        make("div", { class: "toggle", role: "group", "aria-label": "Colour by" }, ...this.toggles), this.key);
      this.tokens = make("div", { class: "tokens", role: "listbox", tabindex: "0", "aria-label": "Tokens of the response" });
      this.tokens.addEventListener("click", (event) => {
        const token = event.target.closest("[data-token]");
        if (token) this.move(Number(token.dataset.token));
      });
      this.trace = draw("svg", { class: "trace", role: "img", viewBox: "0 0 700 150", preserveAspectRatio: "none" });
      this.trace.addEventListener("click", (event) => {
        const box = this.trace.getBoundingClientRect();
        const x = ((event.clientX - box.left) / box.width) * this.width();
        this.move(Math.round(((x - this.left) / (this.width() - this.left - 8)) * Math.max(1, this.count() - 1)));
      });
      const reading = make("div", { class: "reading" }, head, this.tokens, this.trace);

      this.live = make("div", { "aria-live": "polite", "aria-atomic": "true", class: "token-detail" });
      this.jumps = make("div", {});
      this.root.replaceChildren(pick, reading, make("div", { class: "detail" }, this.live, this.jumps));
      this.root.addEventListener("keydown", (event) => this.press(event));
      new ResizeObserver(() => this.current && this.drawTrace()).observe(reading);
      this.list.id = `${prefix}-list`;
    }

    width() { return Math.max(200, this.trace.clientWidth || 700); }
    count() { return this.current.pieces.length; }

    filter() {
      const { value } = this.verdict;
      this.shown = this.responses.filter((one) =>
        (value === "all" || one.success === (value === "right")) &&
        (this.tick.value === "" || String(one.tick) === this.tick.value));
      const rows = [];
      this.shown.forEach((one, place) => {
        if (!place || this.shown[place - 1].tick !== one.tick) {
          rows.push(make("div", { class: "group", role: "presentation", text: `tick ${one.tick}` }));
        }
        rows.push(make("div", {
          role: "option", id: `${this.prefix}-o${place}`, "data-place": place, "aria-selected": "false",
          "aria-label": `tick ${one.tick}, ${words(one.level)}, ${one.success ? "right" : "wrong"}, ${one.pieces.length} tokens`,
        },
        make("span", { class: one.success ? "right" : "wrong", text: one.success ? "✓" : "✗" }),
        make("span", { class: "level", text: words(one.level) }),
        make("span", { class: "count", text: one.pieces.length.toLocaleString("en") })));
      });
      this.list.replaceChildren(...rows);
      if (!this.shown.length) {
        this.list.replaceChildren(make("p", { class: "note", text: "none of this kind" }));
        return;
      }
      this.open(Math.max(0, this.shown.indexOf(this.current)));
    }

    open(place) {
      if (!this.shown.length) return;
      this.place = Math.min(Math.max(place, 0), this.shown.length - 1);
      this.list.querySelector('[aria-selected="true"]')?.setAttribute("aria-selected", "false");
      const option = document.getElementById(`${this.prefix}-o${this.place}`);
      option.setAttribute("aria-selected", "true");
      this.list.setAttribute("aria-activedescendant", option.id);
      this.reveal(this.list, option);
      const fresh = this.shown[this.place] !== this.current;
      this.current = this.shown[this.place];
      if (fresh) this.cursor = 0;
      const one = this.current;
      const end = one.stopped ? "ended by itself" : "cut off";
      this.outcome.replaceChildren(
        make("strong", { class: one.success ? "right" : "wrong", text: one.success ? "right" : "wrong" }),
        `  reward ${told(one.reward, 2)} · ${end}${one.reason ? ` · ${words(one.reason)}` : ""}`);
      this.render();
      this.drawTrace();
      this.showJumps();
      this.move(this.cursor);
    }

    // A nested scroller must not move the page, as scrollIntoView would.
    reveal(box, child) {
      const top = child.offsetTop - 28;
      if (top < box.scrollTop) box.scrollTop = top;
      const low = child.offsetTop + child.offsetHeight + 8;
      if (low > box.scrollTop + box.clientHeight) box.scrollTop = low - box.clientHeight;
    }

    setColour(kind) {
      this.colour = kind;
      for (const button of this.toggles) button.setAttribute("aria-pressed", String(button.dataset.colour === kind));
      if (this.current) {
        this.render();
        this.move(this.cursor);
      }
    }

    scale() {
      const sizes = (this.current[this.colour] || []).filter(known).map(Math.abs);
      return Math.max(this.colour === "value" ? 1 : 0.01, ...sizes.length ? [sizes.reduce((a, b) => Math.max(a, b))] : []);
    }

    render(centre = this.cursor) {
      const one = this.current;
      const total = this.count();
      const low = Math.max(0, Math.min(centre - WINDOW / 2, total - WINDOW));
      const high = Math.min(total, low + WINDOW);
      this.drawn = [low, high];
      const scale = this.scale();
      const nodes = [];
      const jump = (text, to) => {
        const button = make("button", { type: "button", class: "more", text });
        button.addEventListener("click", (event) => {
          event.stopPropagation();
          this.move(to);
          this.tokens.focus(); // the button is gone
        });
        return button;
      };
      const tail = one.prompt.length > WINDOW ? one.prompt.slice(-WINDOW) : one.prompt;
      const prompt = (tail.length < one.prompt.length ? "… " : "") + tail.map(visible).join("");
      nodes.push(make("div", { class: "prompt", role: "presentation", title: "prompt", text: prompt }));
      if (low > 0) nodes.push(jump(`… ${low.toLocaleString("en")} earlier tokens`, low - 1));
      for (let n = low; n < high; n++) {
        const x = (one[this.colour] || [])[n];
        const token = make("span", {
          class: known(x) ? "token" : "token unknown", role: "option", id: `${this.prefix}-t${n}`,
          "data-token": n, "aria-selected": "false", text: visible(one.pieces[n]),
        });
        const share = known(x) ? Math.min(1, Math.abs(x) / scale) : 0;
        token.style.setProperty("--pole", x < 0 ? "var(--orange)" : "var(--blue)");
        token.style.setProperty("--much", (58 * share).toFixed(1));
        nodes.push(token);
      }
      if (high < total) nodes.push(jump(`… ${(total - high).toLocaleString("en")} later tokens`, high));
      this.tokens.replaceChildren(...nodes);
      const ramp = make("span", { class: "ramp", "aria-hidden": "true" });
      const end = (pole) => `color-mix(in srgb, var(${pole}) 58%, transparent)`;
      ramp.style.background = `linear-gradient(to right, ${end("--orange")}, transparent, ${end("--blue")})`;
      const [bad, good] = this.colour === "value" ? ["will fail", "will succeed"] : ["worse than expected", "better"];
      this.key.replaceChildren(`${told(-scale, 2)} ${bad}`, ramp, `${told(scale, 2)} ${good}`);
    }

    // V after token n: of the next state, the reward at the end.
    after(n) {
      const { value, reward } = this.current;
      if (!value) return null;
      return n + 1 < value.length ? value[n + 1] : reward;
    }

    change(n) {
      const { value } = this.current;
      return value && known(value[n]) && known(this.after(n)) ? this.after(n) - value[n] : null;
    }

    move(to) {
      const one = this.current;
      if (!one || !one.pieces.length) return;
      this.cursor = Math.min(Math.max(to, 0), this.count() - 1);
      const n = this.cursor;
      const [low, high] = this.drawn;
      if ((n < low + MARGIN && low > 0) || (n >= high - MARGIN && high < this.count())) this.render(n);
      const before = this.tokens.querySelector(".here");
      if (before) {
        before.classList.remove("here");
        before.setAttribute("aria-selected", "false");
      }
      const token = document.getElementById(`${this.prefix}-t${n}`);
      token.classList.add("here");
      token.setAttribute("aria-selected", "true");
      this.tokens.setAttribute("aria-activedescendant", token.id);
      this.reveal(this.tokens, token);
      const of = (name) => (one[name] || [])[n];
      const last = n === this.count() - 1;
      const rows = [
        ["token id", String(one.tokens[n])], ["V before it", told(of("value"))],
        [last ? "change of V, to the reward" : "change of V", known(this.change(n)) ? signed(this.change(n)) : "not measured"],
        ["advantage", told(of("advantage"))], ["ratio π_old / μ", told(of("ratio"))],
        ["log-prob, sampler", told(of("logp_rollout"), 4)], ["log-prob, trainer", told(of("logp_old"), 4)],
        ["weight in the loss", told(of("weight"))],
      ];
      const list = make("dl");
      for (const [name, value] of rows) list.append(make("dt", { text: name }), make("dd", { text: value }));
      this.live.replaceChildren(
        make("h4", { text: `Token ${(n + 1).toLocaleString("en")} of ${this.count().toLocaleString("en")}` }),
        make("p", { class: "text", text: short(one.pieces[n]) }), list);
      this.placeCursor();
    }

    showJumps() {
      this.jumps.replaceChildren();
      if (!this.current.value) return;
      const changes = [];
      for (let n = 0; n + 1 < this.count(); n++) if (known(this.change(n))) changes.push([n, this.change(n)]);
      for (const [title, sign, kind] of [["Where V rose most", 1, "up"], ["Where V fell most", -1, "down"]]) {
        const most = changes.filter(([, d]) => d * sign > 0).sort((a, b) => (b[1] - a[1]) * sign).slice(0, 3);
        const items = most.map(([n, d]) => {
          const button = make("button", { type: "button", "data-jump": n, "aria-label": `token ${n + 1}, V ${signed(d)}` },
            make("span", { text: `${short(this.current.pieces[n])}` }),
            make("span", { class: kind, text: `${signed(d)} at ${n + 1}` }));
          button.addEventListener("click", () => this.move(n));
          return make("li", {}, button);
        });
        const list = items.length ? make("ul", { class: "jumps" }, ...items) : make("p", { class: "note", text: "nowhere" });
        this.jumps.append(make("h4", { text: title }), list);
      }
    }

    drawTrace() {
      const one = this.current;
      const width = this.width();
      this.left = 38;
      this.trace.setAttribute("viewBox", `0 0 ${width} 150`);
      const values = one.value || [];
      const sizes = values.filter(known);
      this.trace.setAttribute("aria-label", sizes.length ? "V over the tokens of the response" : "V was not measured");
      if (!sizes.length) {
        this.trace.replaceChildren(draw("text", { x: width / 2, y: 75, "text-anchor": "middle" }, "V was not measured"));
        return;
      }
      this.top = Math.max(1, sizes.reduce((a, b) => Math.max(a, Math.abs(b)), 0));
      const nodes = [];
      for (const level of [-this.top, 0, this.top]) {
        const y = this.y(level);
        nodes.push(draw("line", { class: level ? "axis" : "zero", x1: this.left, x2: width - 8, y1: y, y2: y }));
        nodes.push(draw("text", { x: this.left - 6, y: y + 4, "text-anchor": "end" }, told(level, 1)));
      }
      nodes.push(draw("text", { x: this.left + 4, y: 10 }, "V(sₜ)"));
      // Of a long response the least and the greatest V of each stretch, so that no peak is lost.
      const step = Math.max(1, Math.ceil((2 * values.length) / POINTS));
      let path = "";
      let pen = "M";
      for (let start = 0; start < values.length; start += step) {
        let low = -1;
        let high = -1;
        for (let n = start; n < Math.min(start + step, values.length); n++) {
          if (!known(values[n])) continue;
          if (low < 0 || values[n] < values[low]) low = n;
          if (high < 0 || values[n] > values[high]) high = n;
        }
        if (low < 0) { pen = "M"; continue; }
        const both = low === high ? [low] : [Math.min(low, high), Math.max(low, high)];
        for (const n of both) {
          path += `${pen}${this.x(n).toFixed(1)} ${this.y(values[n]).toFixed(1)}`;
          pen = "L";
        }
      }
      nodes.push(draw("path", { class: "path", d: path }));
      this.line = draw("line", { class: "cursor", y1: 4, y2: 146 });
      this.dot = draw("circle", { class: "dot", r: 3.5 });
      this.trace.replaceChildren(...nodes, this.line, this.dot);
      this.placeCursor();
    }

    x(n) { return this.left + (n / Math.max(1, this.count() - 1)) * (this.width() - this.left - 8); }
    y(value) { return 75 - (value / this.top) * 62; }

    placeCursor() {
      if (!this.line || !this.line.isConnected) return;
      const x = this.x(this.cursor);
      const value = (this.current.value || [])[this.cursor];
      this.line.setAttribute("x1", x);
      this.line.setAttribute("x2", x);
      this.dot.setAttribute("cx", x);
      this.dot.setAttribute("cy", known(value) ? this.y(value) : -9);
    }

    press(event) {
      if (event.ctrlKey || event.altKey || event.metaKey || event.target.tagName === "SELECT") return;
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -100, PageDown: 100 };
      const turns = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1 };
      if (event.key in moves) this.move(this.cursor + moves[event.key]);
      else if (event.key === "Home") this.move(0);
      else if (event.key === "End") this.move(this.count() - 1);
      else if (event.key in turns) this.open(this.place + turns[event.key]);
      else return;
      event.preventDefault();
    }
  }

  for (const root of document.querySelectorAll(".viewer")) {
    const { responses } = JSON.parse(document.getElementById(root.dataset.from).textContent);
    new Viewer(root, responses, root.dataset.prefix);
  }
})();
