// Talking to the server: JSON, server-sent events, and errors as the server said them.

const KEY = "jaxserve-key";

export class ServerError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function answer(path, options) {
  let response;
  try {
    response = await fetch(path, { headers: headers(), ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer.", 0, "unreachable");
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    const { message, code } = body.error ?? {};
    throw new ServerError(message ?? body.reason ?? `HTTP ${response.status}`, response.status, code);
  }
  return response;
}

export const getJson = async (path) => (await answer(path)).json();

// Yields the JSON of each event; ends at [DONE]. An error event, or an end without [DONE] where one is due, throws.
export async function* events(path, { body, signal, endless = false }) {
  const options = body === undefined ? { signal } : { signal, method: "POST", body: JSON.stringify(body) };
  const reader = (await answer(path, options)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ServerError("The connection broke; the answer is incomplete.", 0, "broken");
      });
      if (done) break;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const text = frame.slice("data: ".length);
        if (text === "[DONE]") return;
        const event = JSON.parse(text);
        if (event.error) throw new ServerError(event.error.message, 200, event.error.code);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
  if (!endless) throw new ServerError("The connection broke; the answer is incomplete.", 0, "broken");
}
