import type { Schemas } from "@spoolhq/client";
import { useAgentSession, useClient, useExecution, useMessages } from "@spoolhq/react";
import { useState } from "react";
import { Link, useLocation } from "wouter";
import { Composer } from "./composer";
import { ConnectionLine } from "./connection";
import { Conversation } from "./conversation";
import { formatCost, formatDuration } from "./conversation/format";
import { ErrorNote } from "./error";
import { readSeq, useParameters } from "./location";
import { phaseOf, PhaseMark, phaseWords } from "./phase";
import { visible } from "./text";
import { Time } from "./time";
import "./session.css";

type Execution = Schemas["spool.v1.Execution"];

const active = new Set(["queued", "starting", "running", "waiting_for_approval"]);

/** An open session: its head, its conversation and the composer. */
export function SessionPage({ id }: { id: string }) {
  const { session, error } = useAgentSession(id);
  const { connection } = useMessages(id);
  const execution = useExecution(id);
  const { parameters, set, linkTo } = useParameters();
  const at = readSeq(parameters);
  const isDeleted = connection.status === "ended" && connection.reason === "deleted";

  return (
    <section className="session" aria-label="Session">
      <header className="session-head">
        <Link href={linkTo("/")} className="button button-quiet layout-only-narrow" aria-label="Back to the sessions">
          ‹
        </Link>
        <PhaseMark phase={session ? phaseOf(session) : execution.phase} />
        <h1 className="session-title truncate" title={session?.title ? visible(session.title) : undefined}>
          <bdi>{session?.title ? visible(session.title).replaceAll("\n", " ") : "New session"}</bdi>
        </h1>
        <ConnectionLine connection={connection} />
        <button className="button layout-only-drawer" onClick={() => set({ tab: "files" })}>
          Details
        </button>
      </header>
      {session && <Facts session={session} />}
      {isDeleted ? <p className="session-note">This session was deleted, or does not exist.</p> : error && <ErrorNote error={error} />}
      <Conversation key={id} sessionId={id} {...(at !== undefined && { at })} />
      {!isDeleted && (
        <footer className="session-foot">
          <Turn execution={execution} />
          <Composer key={id} sessionId={id} isRunning={active.has(execution.phase ?? "")} interrupt={execution.interrupt} />
        </footer>
      )}
    </section>
  );
}

/** The line below the title: what runs the session, where, and for how much. */
function Facts({ session }: { session: Schemas["spool.v1.Session"] }) {
  const cost = (session.costUsd ?? 0) + (session.sandboxCostUsd ?? 0);
  const model = session.sessionOptions?.model;
  return (
    <div className="session-facts muted">
      <span>{phaseWords(phaseOf(session))}</span>
      <span>
        <bdi>{visible(session.agent ?? "default")}</bdi> · {session.architecture}
        {model ? ` · ${visible(model)}` : ""}
      </span>
      {session.sandbox && <span>{session.sandbox}</span>}
      {cost > 0 && <span>{formatCost(cost)}</span>}
      <span>
        <Time at={session.createdAt} />
      </span>
      <DeleteSession session={session} />
    </div>
  );
}

/** Deletes the session after a second click. */
function DeleteSession({ session }: { session: Schemas["spool.v1.Session"] }) {
  const client = useClient();
  const [, navigate] = useLocation();
  const { linkTo } = useParameters();
  const [asked, setAsked] = useState(false);
  const [error, setError] = useState<unknown>();
  const remove = async () => {
    try {
      await client.session(session.sessionId!).delete();
      navigate(linkTo("/"));
    } catch (failure) {
      setError(failure);
    }
  };
  return (
    <>
      {asked ? (
        <span className="session-delete" role="group" aria-label="Delete this session?">
          <button className="session-action button-danger" onClick={remove}>
            Delete this session and its files
          </button>
          <button className="session-action" autoFocus onClick={() => setAsked(false)}>
            Keep
          </button>
        </span>
      ) : (
        <button className="session-action session-delete" onClick={() => setAsked(true)}>
          Delete…
        </button>
      )}
      {error !== undefined && <ErrorNote error={error} />}
    </>
  );
}

/** The newest turn: why it waits, what can be done with it, and what it cost. */
function Turn({ execution: { execution, phase, error, cancel, pause, resume, recover } }: { execution: ReturnType<typeof useExecution> }) {
  const [failure, setFailure] = useState<unknown>();
  const [busy, setBusy] = useState(false);
  const run = (action: () => Promise<unknown>) => async () => {
    setBusy(true);
    setFailure(undefined);
    try {
      await action();
    } catch (e) {
      setFailure(e);
    } finally {
      setBusy(false);
    }
  };
  // The conversation shows how other turns ended.
  const isActive = active.has(phase ?? "");
  if (!execution || !(isActive || phase === "paused" || phase === "failed")) return null;
  return (
    <div className="session-turn">
      {/* A request for a decision is shown by its card. */}
      {execution.waiting && execution.waiting.reason !== "approval" && (
        <p className="session-waiting" role="status">
          <bdi>{visible(execution.waiting.detail ?? "")}</bdi> <bdi>{visible(execution.waiting.remedy ?? "")}</bdi>
        </p>
      )}
      <div className="session-turn-line">
        <PhaseMark phase={phase} />
        <span className="muted" aria-live="polite">
          Turn {phaseWords(phase)}
        </span>
        <TurnFacts execution={execution} />
        <span className="session-turn-actions">
          {phase === "running" && (
            <button className="button" disabled={busy} onClick={run(pause)}>
              Pause
            </button>
          )}
          {phase === "paused" && (
            <button className="button" disabled={busy} onClick={run(resume)}>
              Resume
            </button>
          )}
          {(isActive || phase === "paused") && (
            <button className="button" disabled={busy} onClick={run(cancel)}>
              Cancel turn
            </button>
          )}
          {phase === "failed" && (
            <button className="button" disabled={busy} onClick={run(recover)} title="Continues the failed turn with the agent's own conversation">
              Recover turn
            </button>
          )}
        </span>
      </div>
      {(failure ?? error) != null && <ErrorNote error={failure ?? error} />}
    </div>
  );
}

function TurnFacts({ execution }: { execution: Execution }) {
  const { durationMs, costUsd, usage } = execution;
  const tokens = (usage?.inputTokens ?? 0) + (usage?.outputTokens ?? 0);
  const facts = [durationMs && formatDuration(durationMs), costUsd && formatCost(costUsd), tokens && `${tokens.toLocaleString("en")} tokens`];
  return <span className="muted">{facts.filter(Boolean).join(" · ")}</span>;
}
