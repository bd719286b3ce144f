import { SpoolError, StreamEndedError, endReasonOf, type StreamEndReason, type StreamStatus } from "@spoolhq/client";
import { nextFrame } from "./frame.js";

/** The connection of a stream, for a display. */
export interface Connection {
  status: "connecting" | "live" | "reconnecting" | "ended";
  /** Why the stream has ended. */
  reason?: StreamEndReason;
  /** When the status began, in milliseconds since 1970. */
  since: number;
}

/** What every snapshot has. */
export interface SourceSnapshot {
  connection: Connection;
  error: Error | undefined;
}

/** The connection of a source that was never subscribed to. */
export const idleConnection: Connection = { status: "connecting", since: 0 };

const reopenDelayMs = 1000;

/**
 * A source of snapshots that runs while it has subscribers: run is started with the first one, and aborted after the last one
 * has left and no other came meanwhile. It publishes at most one snapshot a frame.
 */
export abstract class Source<S extends SourceSnapshot> {
  /** The snapshot before anything was read, which a server renders. */
  readonly initial: S;
  #snapshot: S;
  readonly #listeners = new Set<() => void>();
  #running: AbortController | undefined;
  #cancelFrame: (() => void) | undefined;

  constructor(initial: S) {
    this.initial = this.#snapshot = initial;
  }

  /** Follows the server until the signal is aborted. A temporary error makes the source call it again. */
  protected abstract run(signal: AbortSignal): Promise<void>;
  /** Takes in what has arrived, and returns what is different in the next snapshot. */
  protected abstract collect(): Partial<S>;
  /** Called when the first subscriber comes, and when the last one has left. */
  protected retained(_active: boolean): void {}

  readonly getSnapshot = (): S => this.#snapshot;

  readonly subscribe = (listener: () => void): (() => void) => {
    this.#listeners.add(listener);
    if (!this.#running) this.#start();
    return () => {
      this.#listeners.delete(listener);
      // StrictMode and navigation subscribe again at once: the connection stays.
      setTimeout(() => this.#listeners.size === 0 && this.#stop());
    };
  };

  /** Publishes a snapshot with the next frame. */
  protected schedule(): void {
    if (this.#listeners.size === 0) return; // #start schedules
    this.#cancelFrame ??= nextFrame(this.#flush);
  }

  protected set connection(connection: Omit<Connection, "since">) {
    if (connection.status === this.#next.connection?.status) return;
    this.#next.connection = { ...connection, since: Date.now() };
    this.schedule();
  }

  protected set error(error: Error | undefined) {
    this.#next.error = error;
    this.schedule();
  }

  protected readonly onStatus = (status: StreamStatus): void => {
    if (status.type === "connected") {
      this.connection = { status: "live" };
      this.error = undefined;
    } else if (status.type === "disconnected") this.connection = { status: "reconnecting" };
  };

  #next: Partial<SourceSnapshot> = {};

  readonly #flush = (): void => {
    this.#cancelFrame = undefined;
    const changes = this.collect();
    const before = this.#snapshot;
    const next = { ...before, ...changes, ...this.#next };
    if ((Object.keys(next) as (keyof S)[]).every((name) => next[name] === before[name])) return;
    this.#snapshot = next;
    for (const listener of [...this.#listeners]) listener();
  };

  #start(): void {
    const abort = (this.#running = new AbortController());
    this.retained(true);
    this.connection = { status: "connecting" };
    this.schedule();
    void this.#runUntilEnd(abort.signal);
  }

  #stop(): void {
    if (!this.#running) return;
    this.#running.abort();
    this.#running = undefined;
    this.#cancelFrame?.();
    this.#cancelFrame = undefined;
    this.retained(false);
  }

  async #runUntilEnd(signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      try {
        return await this.run(signal);
      } catch (error) {
        if (signal.aborted) return;
        const reason = error instanceof StreamEndedError ? error.reason : endReasonOf(error);
        if (reason) return this.end(reason, error as SpoolError);
        this.error = error as Error;
        this.connection = { status: "reconnecting" };
        await new Promise((resolve) => setTimeout(resolve, reopenDelayMs));
      }
    }
  }

  /** Publishes that the source has ended. */
  protected end(reason: StreamEndReason, error: SpoolError): void {
    this.connection = { status: "ended", reason };
    this.error = error instanceof StreamEndedError ? error : new StreamEndedError(reason, 0, error);
  }
}

/** Runs an asynchronous function, at most one at a time: calls during a run return that run. */
export function single(work: () => Promise<void>): () => Promise<void> {
  let running: Promise<void> | undefined;
  return () => (running ??= work().finally(() => (running = undefined)));
}

/** Runs an asynchronous function, at most one at a time: calls during a run cause one more run. */
export function coalesced(work: () => Promise<void>): () => Promise<void> {
  let running: Promise<void> | undefined;
  let again = false;
  const loop = async () => {
    do {
      again = false;
      await work();
    } while (again);
  };
  return () => {
    if (running) again = true;
    else running = loop().finally(() => (running = undefined));
    return running!;
  };
}
