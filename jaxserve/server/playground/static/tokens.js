// The text of an answer, token by token. What is shown is always exactly the content the server sent; tokens are laid
// over it. Text goes into the page as text nodes only.

const tip = document.getElementById("tip");
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > -4.6 ? 1 : 3)} %`;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export class Answer {
  #box;
  #decoder = new TextDecoder();
  #pending = []; // tokens whose text has not been shown yet
  #rest = ""; // content no token has been found for yet
  text = "";
  numTokens = 0;
  numDrafts = 0;

  constructor(box) {
    this.#box = box;
    box.addEventListener("keydown", (event) => this.#move(event));
  }

  add(content, details, logprobs) {
    this.text += content;
    this.#rest += content;
    details.forEach((detail, i) => {
      const text = this.#decoder.decode(new Uint8Array(detail.bytes), { stream: true });
      this.#pending.push({ text, detail, logprob: logprobs[i] });
      this.numTokens += 1;
      this.numDrafts += detail.accepted_draft;
    });
    this.#lay(details.length === 0 && this.#pending.length === 0);
  }

  end() {
    this.#lay(true);
  }

  #lay(all) {
    while (this.#rest && this.#pending.length) {
      const [next] = this.#pending;
      if (this.#rest.startsWith(next.text)) {
        this.#pending.shift();
        if (next.text) this.#show(next);
        this.#rest = this.#rest.slice(next.text.length);
      } else if (next.text.startsWith(this.#rest) && !all) {
        return; // the rest of it is held back
      } else {
        this.#pending.shift(); // a special token, which has no text
      }
    }
    if (all && this.#rest) {
      this.#box.append(this.#rest);
      this.#rest = "";
    }
  }

  #show({ text, detail, logprob }) {
    const token = element("span", text, detail.accepted_draft ? "token draft" : "token");
    token.tabIndex = this.#box.querySelector(".token") ? -1 : 0;
    const show = () => showTip(token, detail, logprob);
    token.addEventListener("pointerenter", show);
    token.addEventListener("focus", show);
    token.addEventListener("pointerleave", hideTip);
    token.addEventListener("blur", hideTip);
    this.#box.append(token);
  }

  #move(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") hideTip();
    if (!(event.key in steps) || !event.target.classList.contains("token")) return;
    const tokens = [...this.#box.querySelectorAll(".token")];
    const to = Math.min(tokens.length - 1, Math.max(0, tokens.indexOf(event.target) + steps[event.key]));
    event.target.tabIndex = -1;
    tokens[to].tabIndex = 0;
    tokens[to].focus();
    event.preventDefault();
  }
}

function showTip(token, detail, logprob) {
  tip.replaceChildren(element("div", `Token ${detail.token_id}${detail.accepted_draft ? ", an accepted draft" : ""}`));
  if (logprob) {
    const table = element("table");
    const rows = logprob.top_logprobs.some((each) => each.token === logprob.token)
      ? logprob.top_logprobs
      : [logprob, ...logprob.top_logprobs];
    for (const each of rows) {
      const row = table.insertRow();
      if (each.token === logprob.token) row.className = "chosen";
      row.insertCell().textContent = visible(each.token);
      row.insertCell().textContent = each.logprob.toFixed(3);
      row.insertCell().textContent = percent(each.logprob);
    }
    tip.append(table);
  }
  tip.hidden = false;
  token.setAttribute("aria-describedby", "tip");
  const at = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const below = at.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? at.bottom + 6 : Math.max(8, at.top - 6 - tip.offsetHeight)}px`;
}

function hideTip() {
  tip.hidden = true;
  document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
}
