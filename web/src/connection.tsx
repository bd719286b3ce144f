import type { Connection } from "@spoolhq/react";
import { useEffect, useState } from "react";
import "./connection.css";

/** A cut that is shorter than this is not shown. */
const quietMs = 2000;

const endings: Record<string, string> = {
  deleted: "This session was deleted.",
  unauthenticated: "Signed out: no longer live.",
  forbidden: "Your key may no longer read this.",
  cursor_ahead: "This page knows later events than the server: its data was restored. Load the page again.",
  cursor_expired: "Events that this page lacks are no longer kept. Load the page again.",
};

/** The state of a connection: a quiet dot while it is live, a line after 2 s without it. */
export function ConnectionLine({ connection }: { connection: Connection }) {
  const { status, since, reason } = connection;
  const [late, setLate] = useState(false);
  useEffect(() => {
    setLate(false);
    if (status === "live" || status === "ended") return;
    const timer = setTimeout(() => setLate(true), Math.max(0, since + quietMs - Date.now()));
    return () => clearTimeout(timer);
  }, [status, since]);

  const text = status === "ended" ? (endings[reason ?? ""] ?? "The stream has ended. Load the page again.") : late ? "Reconnecting, nothing is lost" : "Live";
  const state = status === "ended" ? "ended" : late ? "late" : "live";
  return (
    <p className={`connection connection-${state}`} role="status" title={text}>
      <span aria-hidden="true">{state === "live" ? "•" : "○"}</span> <span className={state === "live" ? "visually-hidden" : ""}>{text}</span>
    </p>
  );
}
