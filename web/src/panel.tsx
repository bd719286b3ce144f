import type { KeyboardEvent } from "react";
import { EventTab } from "./event";
import { FilesTab } from "./files";
import { useParameters } from "./location";
import { UsageTab } from "./usage";
import "./panel.css";

const tabs = ["event", "files", "usage"] as const;
const labels = { event: "Event", files: "Files", usage: "Usage" };

/** The details of a session. The tab is a part of the URL: with one, the panel is open in a window that has it in a drawer. */
export function Panel({ sessionId }: { sessionId: string }) {
  const { parameters, set } = useParameters();
  const tab = tabs.find((t) => t === parameters.get("tab")) ?? (parameters.has("seq") ? "event" : "files");
  const onKeyDown = (event: KeyboardEvent<HTMLElement>) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length]!;
    set({ tab: next }, { replace: true });
    document.getElementById(`panel-tab-${next}`)?.focus();
  };
  return (
    <>
      <div className="panel-head">
        <div className="panel-tabs" role="tablist" aria-label="Details" onKeyDown={onKeyDown}>
          {tabs.map((t) => (
            <button key={t} id={`panel-tab-${t}`} role="tab" className="panel-tab" aria-selected={t === tab} aria-controls="panel-content" tabIndex={t === tab ? 0 : -1} onClick={() => set({ tab: t }, { replace: true })}>
              {labels[t]}
            </button>
          ))}
        </div>
        <button className="button button-quiet layout-only-drawer" aria-label="Close the panel" onClick={() => set({ tab: undefined })}>
          ✕
        </button>
      </div>
      <div id="panel-content" className="panel-content" role="tabpanel" aria-labelledby={`panel-tab-${tab}`} tabIndex={-1} key={sessionId}>
        {tab === "event" && <EventTab sessionId={sessionId} />}
        {tab === "files" && <FilesTab sessionId={sessionId} />}
        {tab === "usage" && <UsageTab sessionId={sessionId} />}
      </div>
    </>
  );
}
