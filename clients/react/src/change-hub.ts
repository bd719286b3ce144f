import type { SessionChange, SpoolClient, StreamStatus } from "@spoolhq/client";

interface Listener {
  receive(change: SessionChange): void;
  fail(error: unknown): void;
  onStatus(status: StreamStatus): void;
}

/** One stream of the changes of all sessions for all sources of a client, because a browser opens few connections to a host. */
class ChangeHub {
  readonly #listeners = new Set<Listener>();
  #running: AbortController | undefined;
  #cursor: string | undefined; // undefined until the stream has begun
  #connected: StreamStatus | undefined; // undefined while there is no connection

  constructor(private readonly client: SpoolClient) {}

  /** Returns the changes from now on, after an item "started". */
  async *follow(signal: AbortSignal, onStatus: (status: StreamStatus) => void): AsyncGenerator<SessionChange, void, undefined> {
    const changes: SessionChange[] = [];
    let failure: { error: unknown } | undefined;
    let wake = () => {};
    const listener: Listener = {
      onStatus,
      receive: (change) => (changes.push(change), wake()),
      fail: (error) => ((failure = { error }), wake()),
    };
    const abort = () => wake();
    signal.addEventListener("abort", abort);
    this.#listeners.add(listener);
    if (!this.#running) void this.#run((this.#running = new AbortController()));
    else if (this.#cursor !== undefined) {
      listener.receive({ type: "started", cursor: this.#cursor });
      if (this.#connected) onStatus(this.#connected);
    }
    try {
      for (;;) {
        signal.throwIfAborted();
        const change = changes.shift();
        if (change) yield change;
        else if (failure) throw failure.error;
        else await new Promise<void>((resolve) => (wake = resolve));
      }
    } finally {
      signal.removeEventListener("abort", abort);
      this.#listeners.delete(listener);
      if (this.#listeners.size === 0) this.#running?.abort();
    }
  }

  async #run(abort: AbortController): Promise<void> {
    const { signal } = abort;
    const onStatus = (status: StreamStatus) => {
      if (status.type !== "lag") this.#connected = status.type === "connected" ? status : undefined;
      for (const listener of this.#listeners) listener.onStatus(status);
    };
    signal.addEventListener("abort", () => this.#reset(abort));
    try {
      for await (const change of this.client.changes({ signal, onStatus })) {
        this.#cursor = change.cursor;
        for (const listener of this.#listeners) listener.receive(change);
      }
    } catch (error) {
      if (signal.aborted) return; // nobody listens
      this.#reset(abort);
      for (const listener of this.#listeners) listener.fail(error);
    }
  }

  #reset(abort: AbortController): void {
    if (this.#running !== abort) return;
    this.#running = this.#cursor = this.#connected = undefined;
  }
}

const hubs = new WeakMap<SpoolClient, ChangeHub>();

/** Returns the hub of a client. */
export function changeHub(client: SpoolClient): ChangeHub {
  let hub = hubs.get(client);
  if (!hub) hubs.set(client, (hub = new ChangeHub(client)));
  return hub;
}
