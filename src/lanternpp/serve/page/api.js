/** Requests to the server's API, with the API key that the user gave to this tab. */

const KEY = "lanternpp-key"; // of the session's storage

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** Send a request. Throws an Error with a message for the user and, if the server answered, its `status`. */
export async function call(path, body, signal) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  const given = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const answer = await fetch(path, { ...given, headers, signal }).catch(unreachable);
  if (answer.ok) return answer;
  const failure = await answer.json().catch(() => ({}));
  const message = failure.error?.message ?? `the server answered with status ${answer.status}`;
  throw Object.assign(new Error(message), { status: answer.status });
}

function unreachable(error) {
  if (error.name === "AbortError") throw error;
  throw new Error("the server cannot be reached; see whether it still runs");
}

/** The server-sent events of a streamed answer, as objects. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(unreachable);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "));
      if (data) yield JSON.parse(data.slice(6));
    }
  }
}
