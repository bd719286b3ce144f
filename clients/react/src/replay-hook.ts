import { BlockView, StreamEndedError, type Block, type SpoolClient } from "@spoolhq/client";
import { useCallback, useEffect, useMemo } from "react";
import { useClient } from "./provider.js";
import { Source, idleConnection, type SourceSnapshot } from "./source.js";
import { useSource } from "./use-source.js";

type Speed = number | "max";

interface ReplaySnapshot extends SourceSnapshot {
  blocks: readonly Block[];
  seq: number;
  tip: number;
  isPlaying: boolean;
  speed: Speed;
}

const idleReplay: ReplaySnapshot = { blocks: [], seq: 0, tip: 0, isPlaying: false, speed: 1, connection: idleConnection, error: undefined };

/** The state of a session at an event, which play moves forward. */
class ReplaySource extends Source<ReplaySnapshot> {
  #view = new BlockView();
  #changes: Partial<ReplaySnapshot> = {};
  #seq = 0;
  #work = new AbortController(); // the present seek or play
  #speed: Speed;
  #isPlaying = false;

  constructor(
    private readonly client: SpoolClient,
    private readonly id: string,
    speed: Speed,
    private readonly first: number | undefined,
  ) {
    super({ ...idleReplay, speed });
    this.#speed = speed;
  }

  protected async run(signal: AbortSignal): Promise<void> {
    const { tip = 0 } = await this.client.session(this.id).get({ signal });
    this.#set({ tip });
    this.connection = { status: "live" };
    if (this.#seq === 0) await this.seek(Math.min(this.first ?? 1, tip));
  }

  protected override retained(active: boolean): void {
    if (!active) this.#stop();
  }

  #set(changes: Partial<ReplaySnapshot>): void {
    Object.assign(this.#changes, changes);
    this.schedule();
  }

  protected collect(): Partial<ReplaySnapshot> {
    const changes = { ...this.#changes, blocks: this.#view.blocks(), seq: this.#seq };
    this.#changes = {};
    return changes;
  }

  #stop(): AbortSignal {
    this.#work.abort();
    this.#work = new AbortController();
    this.#isPlaying = false;
    this.#set({ isPlaying: false });
    return this.#work.signal;
  }

  /** Shows the session as it was after an event. */
  readonly seek = async (seq: number): Promise<void> => {
    const wasPlaying = this.#isPlaying;
    const signal = this.#stop();
    try {
      const state = await this.client.session(this.id).state(Math.max(1, seq), { signal });
      if (signal.aborted) return;
      this.#view = new BlockView();
      this.#view.prepend(state.blocks, state.seq ?? seq);
      this.#seq = state.seq ?? seq;
      this.error = undefined;
      this.schedule();
    } catch (error) {
      if (!signal.aborted) this.error = error as Error;
      return;
    }
    if (wasPlaying) this.play();
  };

  /** Plays on from the present event, up to the last one. */
  readonly play = (): void => {
    if (this.#isPlaying) return;
    const signal = this.#stop();
    this.#isPlaying = true;
    this.#set({ isPlaying: true });
    void this.#play(signal);
  };

  async #play(signal: AbortSignal): Promise<void> {
    try {
      for await (const event of this.client.session(this.id).replay({ from: this.#seq + 1, speed: this.#speed, signal })) {
        if (event.type === "replay_started" && "tip" in event) this.#set({ tip: event.tip });
        if (!("source" in event)) continue; // a notice
        this.#view.apply(event);
        if (event.type !== "text_delta") this.#seq = event.seq;
        this.schedule();
      }
      this.#stop();
    } catch (error) {
      if (signal.aborted) return;
      this.#stop();
      // There is no event after the last one.
      if (!(error instanceof StreamEndedError && error.reason === "cursor_ahead")) this.error = error as Error;
    }
  }

  readonly pause = (): void => void this.#stop();

  readonly setSpeed = (speed: Speed): void => {
    this.#speed = speed;
    this.#set({ speed });
    if (!this.#isPlaying) return;
    this.#stop();
    this.play();
  };
}

export interface UseReplay extends Omit<ReplaySnapshot, "connection"> {
  play(): void;
  pause(): void;
  /** Shows the session as it was after an event; a replay that plays continues from there. */
  seek(seq: number): Promise<void>;
  setSpeed(speed: Speed): void;
}

/** A session at one of its events, which can be played forward at its original speed or faster. */
export function useReplay(sessionId: string | undefined, options: { speed?: Speed; from?: number } = {}): UseReplay {
  const client = useClient();
  const { speed = 1, from } = options;
  const source = useMemo(
    () => (sessionId === undefined ? undefined : new ReplaySource(client, sessionId, speed, from)),
    // The options are those at the beginning.
    [client, sessionId],
  );
  const snapshot = useSource(source, idleReplay, (s) => s);
  const seek = useCallback(async (seq: number) => source?.seek(seq), [source]);
  useEffect(() => () => source?.pause(), [source]);
  return { ...snapshot, play: source?.play ?? noop, pause: source?.pause ?? noop, setSpeed: source?.setSpeed ?? noop, seek };
}

const noop = () => {};
