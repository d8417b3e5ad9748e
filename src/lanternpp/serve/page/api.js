/** Requests to the server's API, with the API key that the user gave to this tab. */

const KEY = "lanternpp-key"; // name of the entry in the session's storage

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** Send a request. Throws an Error with a message for the user and, if the server answered, its `status`. */
export async function call(path, body, signal) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  const post = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const response = await fetch(path, { ...post, headers, signal }).catch(throwUnreachable);
  if (response.ok) return response;
  const failure = await response.json().catch(() => ({}));
  const message = failure.error?.message ?? `the server answered with status ${response.status}`;
  throw Object.assign(new Error(message), { status: response.status });
}

function throwUnreachable(error) {
  if (error.name === "AbortError") throw error;
  throw new Error("the server cannot be reached; see whether it still runs");
}

/** Yield the server-sent events of a streamed response, as objects. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let incomplete = "";
  for (;;) {
    const { value, done } = await reader.read().catch(throwUnreachable);
    if (done) return;
    const blocks = (incomplete + value).split("\n\n");
    incomplete = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").find((line) => line.startsWith("data: "));
      if (data) yield JSON.parse(data.slice(6));
    }
  }
}
