/** Requests to the server, and the events of a streamed answer. */

const UNREACHABLE = "The server does not answer. It may have ended: look at its terminal.";
const BROKEN = "The connection broke off before the answer ended.";

/** An error that the page shows in words. status: HTTP status, or 0 if there is none. */
export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Send a request. Throw Failure with the server's own words for an error. */
export async function request(path, { key, body, signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure(UNREACHABLE);
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Failure(said?.error?.message ?? `The server answered with status ${response.status}.`, response.status);
}

/** Yield the objects of a stream of server-sent events, until its end. */
export async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let left = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) throw new Failure(BROKEN);
      const parts = (left + decoder.decode(value, { stream: true })).split("\n\n");
      left = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Failure(event.error.message);
        yield event;
      }
    }
  } catch (error) {
    throw error instanceof Failure || error.name === "AbortError" ? error : new Failure(BROKEN);
  } finally {
    reader.cancel().catch(() => {});  // the server aborts a request whose client has gone
  }
}
