import type { SessionEvent } from "@spoolhq/client";
import { useClient, useEvents } from "@spoolhq/react";
import { useEffect, useState } from "react";
import { Code, CopyButton } from "./conversation/code";
import { LongText } from "./conversation/longtext";
import { ErrorNote } from "./error";
import { readSeq, useParameters } from "./location";
import { Term } from "./term";
import { visible } from "./text";
import { Time } from "./time";
import "./event.css";

/** Events that the list shows at most. */
const listed = 200;

/** The event of ?seq=, as the log has it; without one, the last events to choose from. */
export function EventTab({ sessionId }: { sessionId: string }) {
  const { parameters } = useParameters();
  const seq = readSeq(parameters);
  return seq !== undefined ? <ChosenEvent sessionId={sessionId} seq={seq} /> : <RecentEvents sessionId={sessionId} />;
}

function ChosenEvent({ sessionId, seq }: { sessionId: string; seq: number }) {
  const client = useClient();
  const { set } = useParameters();
  const [result, setResult] = useState<{ event?: object; error?: unknown }>();
  useEffect(() => {
    const abort = new AbortController();
    setResult(undefined);
    client.call("Events_ListEvents", { path: { session_id: sessionId }, query: { after: seq - 1, limit: 1 } }, { signal: abort.signal }).then(
      ({ events = [] }) => setResult({ ...(events[0] && { event: events[0] }) }),
      (error: unknown) => abort.signal.aborted || setResult({ error }),
    );
    return () => abort.abort();
  }, [client, sessionId, seq]);
  const go = (to: number | undefined) => set({ seq: to?.toString() }, { replace: true });
  const text = result?.event ? JSON.stringify(result.event, null, 2) : "";
  return (
    <>
      <div className="event-bar">
        <button className="button" disabled={seq <= 1} onClick={() => go(seq - 1)}>
          Previous
        </button>
        <span>
          <Term name="event">Event</Term> {seq}
        </span>
        <button className="button" disabled={!result?.event} onClick={() => go(seq + 1)}>
          Next
        </button>
        <button className="button button-quiet" onClick={() => go(undefined)}>
          All
        </button>
        {text && <CopyButton text={text} label="Copy the event" />}
      </div>
      {result?.error !== undefined && <ErrorNote error={result.error} />}
      {result && !result.event && result.error === undefined && <p className="event-empty muted">The session has no event {seq}.</p>}
      {text && (
        <div className="event-json">
          <LongText text={text}>{(part) => <Code text={part} language="json" />}</LongText>
        </div>
      )}
    </>
  );
}

function RecentEvents({ sessionId }: { sessionId: string }) {
  const { events } = useEvents(sessionId);
  const { set } = useParameters();
  if (events.length === 0) {
    return (
      <p className="event-empty muted">
        Events since this page was opened appear here. <code>?seq=1</code> in the address shows the first one.
      </p>
    );
  }
  return (
    <ul className="event-list" aria-label="Last events, newest first">
      {events.slice(0, listed).map((event: SessionEvent) => (
        <li key={event.seq}>
          <button className="event-row" onClick={() => set({ seq: String(event.seq), tab: "event" })}>
            <span className="event-seq muted">{event.seq}</span>
            <span className="truncate">{visible(event.type)}</span>
            <span className="muted">
              <Time at={event.time} />
            </span>
          </button>
        </li>
      ))}
    </ul>
  );
}
