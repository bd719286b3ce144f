import type { Schemas } from "@spoolhq/client";
import { useClient } from "@spoolhq/react";
import { useEffect, useRef, useState, type FormEvent } from "react";
import { Link, useLocation } from "wouter";
import { formatSize } from "./conversation/format";
import { ErrorNote } from "./error";
import { useParameters } from "./location";
import { visible } from "./text";
import { Term } from "./term";
import { FileList, useUploads } from "./uploads";
import "./newsession.css";

type Definition = Schemas["spool.v1.Definition"];

const architectures = ["claude-code", "codex", "opencode", "acp", "spool"];

/** Returns the reference of an agent without its version: the session pins the latest. */
function nameOf({ ref }: Definition): string {
  const prefix = ref?.scope === "platform" || ref?.scope === "identity_account" ? `${ref.scope}/` : "";
  return `${prefix}${ref?.org ? `${ref.org}/` : ""}${ref?.slug ?? ""}`;
}

/** The form that creates a session and sends its first message. */
export function NewSessionPage() {
  const client = useClient();
  const [, navigate] = useLocation();
  const { linkTo } = useParameters();
  const [agents, setAgents] = useState<Definition[]>();
  const [agentsError, setAgentsError] = useState<unknown>();
  const [agent, setAgent] = useState("");
  const [architecture, setArchitecture] = useState("");
  const [model, setModel] = useState("");
  const [message, setMessage] = useState("");
  const [files, setFiles] = useState<readonly File[]>([]);
  const [step, setStep] = useState<"" | "Creating the session…" | "Uploading files…" | "Sending the message…">("");
  const [error, setError] = useState<unknown>();
  const uploads = useUploads();
  // The session that an earlier attempt created, after which a step failed.
  const created = useRef<string>(undefined);

  useEffect(() => {
    const abort = new AbortController();
    client.call("Agents_ListAgents", { query: { pageSize: 200 } }, { signal: abort.signal }).then(
      (list) => setAgents(list.agents ?? []),
      (failure: unknown) => abort.signal.aborted || setAgentsError(failure),
    );
    return () => abort.abort();
  }, [client]);

  const submit = async (event: FormEvent) => {
    event.preventDefault();
    setError(undefined);
    try {
      if (!created.current) {
        setStep("Creating the session…");
        created.current = (await client.createSession({ ...(agent && { agent }), ...(architecture && { architecture }), ...(model && { model }) })).id;
      }
      const session = client.session(created.current);
      uploads.clear();
      for (const file of files) {
        setStep("Uploading files…");
        if (!(await uploads.add(file, (body, options) => session.files.put(file.name, body, options)))) return setStep("");
      }
      setStep("Sending the message…");
      await session.post(message);
      navigate(linkTo(`/sessions/${session.id}`));
    } catch (failure) {
      setError(failure);
      setStep("");
    }
  };

  return (
    <form className="newsession" onSubmit={submit}>
      <header className="newsession-head">
        <Link href={linkTo("/")} className="button button-quiet layout-only-narrow" aria-label="Back to the sessions">
          ‹
        </Link>
        <h1>New session</h1>
      </header>
      <label className="field">
        <span className="field-label">Message</span>
        <textarea className="input newsession-message" rows={5} required autoFocus value={message} onChange={(e) => setMessage(e.target.value)} placeholder="What should the agent do?" />
      </label>
      <div className="newsession-row">
        <label className="field">
          <span className="field-label">
            <Term name="agent">Agent</Term>
          </span>
          <select className="input" value={agent} onChange={(e) => setAgent(e.target.value)}>
            <option value="">default (built in)</option>
            {agents?.map((a) => (
              <option key={nameOf(a)} value={nameOf(a)}>
                {visible(nameOf(a))}
              </option>
            ))}
          </select>
        </label>
        <label className="field">
          <span className="field-label">
            <Term name="architecture">Architecture</Term>
          </span>
          <select className="input" value={architecture} onChange={(e) => setArchitecture(e.target.value)}>
            <option value="">the agent's own</option>
            {architectures.map((a) => (
              <option key={a}>{a}</option>
            ))}
          </select>
        </label>
        <label className="field">
          <span className="field-label">Model</span>
          <input className="input" value={model} onChange={(e) => setModel(e.target.value)} placeholder="the agent's own" spellCheck={false} />
        </label>
      </div>
      {agentsError !== undefined && <ErrorNote error={agentsError} />}
      <label className="field">
        <span className="field-label">
          Files for the <Term name="workspace" />
        </span>
        <input type="file" multiple onChange={(e) => setFiles([...(e.target.files ?? [])])} />
      </label>
      {step === "" && files.length > 0 && <p className="muted">{formatSize(files.reduce((sum, f) => sum + f.size, 0))}</p>}
      <FileList uploads={uploads} />
      {error !== undefined && <ErrorNote error={error} />}
      <div>
        <button className="button button-primary" disabled={step !== "" || message.trim() === ""}>
          {step || "Start the session"}
        </button>
      </div>
    </form>
  );
}
