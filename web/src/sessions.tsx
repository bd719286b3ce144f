import type { Schemas } from "@spoolhq/client";
import { useSessionList } from "@spoolhq/react";
import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useRef, useState, type KeyboardEvent, type ReactNode } from "react";
import { Link } from "wouter";
import { ConnectionLine } from "./connection";
import { formatCost } from "./conversation/format";
import { ErrorNote } from "./error";
import { useParameters } from "./location";
import { phaseOf, PhaseMark, phaseWords } from "./phase";
import { visible } from "./text";
import { Time } from "./time";
import "./sessions.css";

type SessionRow = Schemas["spool.v1.Session"];

/** The filters of the list: their words, and the phases that they show. */
const filters = [
  { name: "Running", phases: ["running", "queued"] },
  { name: "Waiting", phases: ["waiting_for_approval"] },
  { name: "Failed", phases: ["failed"] },
  { name: "Idle", phases: ["idle"] },
];

/** Heights of rows in pixels, as in sessions.css: nothing moves when a row is measured. */
const rowHeight = 54;
const failedRowHeight = 72;
const searchDelayMs = 250;

interface SessionListProps {
  /** The id of the open session. */
  current: string | undefined;
  /** Called when the stream of changes ends because the sign-in has ended. */
  onSignedOut: () => void;
  /** Below the list. */
  children?: ReactNode;
}

/** The live list of sessions, with search and filters. */
export function SessionList({ current, onSignedOut, children }: SessionListProps) {
  const { parameters, set } = useParameters();
  const phase = parameters.get("phase") ?? "";
  const search = parameters.get("q") ?? "";
  const phases = filters.find((f) => f.name.toLowerCase() === phase)?.phases;
  const { sessions, isLoading, error, hasMore, loadMore, refresh, connection } = useSessionList({ ...(phases && { phase: phases }), ...(search && { search }), pageSize: 100 });
  const isSignedOut = connection.reason === "unauthenticated";
  useEffect(() => {
    if (isSignedOut) onSignedOut();
  }, [isSignedOut, onSignedOut]);
  const isFiltered = phases !== undefined || search !== "";

  return (
    <>
      <Search value={search} onChange={(q) => set({ q }, { replace: true })} />
      <div className="sessions-filters" role="group" aria-label="Filter by phase">
        {filters.map(({ name }) => {
          const value = name.toLowerCase();
          return (
            <button key={name} className="sessions-filter" aria-pressed={phase === value} onClick={() => set({ phase: phase === value ? undefined : value }, { replace: true })}>
              {name}
            </button>
          );
        })}
      </div>
      {error && connection.status !== "ended" && <ErrorNote error={error} onRetry={refresh} />}
      {sessions.length > 0 ? (
        <Rows key={`${phase} ${search}`} sessions={sessions} current={current} hasMore={hasMore} loadMore={loadMore} />
      ) : isLoading ? (
        !error && <Skeleton />
      ) : isFiltered ? (
        <p className="sessions-empty">No session matches.</p>
      ) : (
        <Empty />
      )}
      <footer className="sessions-footer">
        <ConnectionLine connection={connection} />
        {children}
      </footer>
    </>
  );
}

function Search({ value, onChange }: { value: string; onChange: (value: string) => void }) {
  const [text, setText] = useState(value);
  const latest = useRef(onChange);
  latest.current = onChange;
  useEffect(() => setText(value), [value]);
  useEffect(() => {
    if (text === value) return;
    const timer = setTimeout(() => latest.current(text), searchDelayMs);
    return () => clearTimeout(timer);
  }, [text, value]);
  return <input id="sessions-search" className="input sessions-search" type="search" aria-label="Search sessions" placeholder="Search titles" maxLength={256} value={text} onChange={(e) => setText(e.target.value)} />;
}

function Rows({ sessions, current, hasMore, loadMore }: { sessions: readonly SessionRow[]; current: string | undefined; hasMore: boolean; loadMore: () => unknown }) {
  const scroller = useRef<HTMLDivElement>(null);
  const list = useVirtualizer({
    count: sessions.length,
    getScrollElement: () => scroller.current,
    getItemKey: (index) => sessions[index]!.sessionId!,
    estimateSize: (index) => heightOf(sessions[index]!),
    overscan: 8,
  });
  // The heights of rows follow from their contents.
  const heights = sessions.filter((s) => s.lastError).length;
  useEffect(() => list.measure(), [heights, list]);

  const items = list.getVirtualItems();
  const last = items[items.length - 1]?.index ?? 0;
  useEffect(() => {
    if (hasMore && last >= sessions.length - 20) loadMore();
  }, [hasMore, last, sessions.length, loadMore]);

  /** Moves the focus between rows with the arrow keys. */
  const onKeyDown = (event: KeyboardEvent<HTMLElement>) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const row = (event.target as HTMLElement).closest<HTMLElement>("[data-index]");
    if (step === undefined || !row) return;
    event.preventDefault();
    const next = Number(row.dataset.index) + step;
    if (next < 0 || next >= sessions.length) return;
    list.scrollToIndex(next);
    requestAnimationFrame(() => scroller.current?.querySelector<HTMLElement>(`[data-index="${next}"] a`)?.focus());
  };

  return (
    <div className="sessions-scroller" ref={scroller} tabIndex={-1} onKeyDown={onKeyDown}>
      <ul className="sessions-list" style={{ height: list.getTotalSize() }} aria-label="Sessions, newest first">
        {items.map((item) => {
          const session = sessions[item.index]!;
          return (
            <li key={item.key} data-index={item.index} aria-setsize={hasMore ? -1 : sessions.length} aria-posinset={item.index + 1} className="sessions-item" style={{ transform: `translateY(${item.start}px)`, height: item.size }}>
              <Row session={session} isCurrent={session.sessionId === current} />
            </li>
          );
        })}
      </ul>
    </div>
  );
}

function heightOf(session: SessionRow): number {
  return session.lastError && phaseOf(session) === "failed" ? failedRowHeight : rowHeight;
}

function Row({ session, isCurrent }: { session: SessionRow; isCurrent: boolean }) {
  const { linkTo } = useParameters();
  const phase = phaseOf(session);
  const approvals = session.openApprovals ?? 0;
  const { lastError, costUsd = 0 } = session;
  return (
    <Link href={linkTo(`/sessions/${session.sessionId}`)} className="sessions-row" aria-current={isCurrent ? "page" : undefined}>
      <PhaseMark phase={phase} />
      <span className="sessions-title truncate" title={session.title ? visible(session.title) : undefined}>
        <bdi>{session.title ? visible(session.title).replaceAll("\n", " ") : <span className="muted">No message yet</span>}</bdi>
      </span>
      <span className="sessions-age muted">
        <Time at={session.phaseSince ?? session.createdAt} />
      </span>
      <span className="sessions-details truncate muted">
        {phase === "waiting_for_approval" ? <strong className="sessions-waiting">{approvals === 1 ? "1 approval" : `${approvals} approvals`}</strong> : phaseWords(phase)}
        {" · "}
        {session.agent && session.agent !== "default" ? `${visible(session.agent)} · ` : ""}
        {session.architecture}
      </span>
      <span className="sessions-cost muted">{costUsd > 0 ? formatCost(costUsd) : ""}</span>
      {lastError && phase === "failed" && (
        <span className="sessions-error truncate" title={visible(lastError.message ?? "")}>
          {lastError.code} <bdi>{visible(lastError.message ?? "").replaceAll("\n", " ")}</bdi>
        </span>
      )}
    </Link>
  );
}

/** Rows without text, of the real shape. They appear after 200 ms (sessions.css). */
function Skeleton() {
  return (
    <div className="sessions-skeleton" role="status">
      <span className="visually-hidden">Loading sessions</span>
      {Array.from({ length: 8 }, (_, i) => (
        <div key={i} className="sessions-skeleton-row" />
      ))}
    </div>
  );
}

/** What an installation without sessions shows. */
function Empty() {
  return (
    <div className="sessions-empty">
      <p>There is no session yet. Start one here, or in a terminal:</p>
      <pre>spool run "hello"</pre>
    </div>
  );
}
