import { useClient, useMessages } from "@spoolhq/react";
import { useRef, useState, type ClipboardEvent, type DragEvent, type FormEvent, type KeyboardEvent } from "react";
import { ErrorNote } from "./error";
import { Term } from "./term";
import { FileList, useUploads } from "./uploads";
import "./composer.css";

/** Texts that were not sent, by session, for as long as the page is open. */
const drafts = new Map<string, string>();

interface ComposerProps {
  sessionId: string;
  isRunning: boolean;
  interrupt: () => Promise<unknown>;
}

/** The field for the next message, with files for the workspace. */
export function Composer({ sessionId, isRunning, interrupt }: ComposerProps) {
  const client = useClient();
  const { sendMessage } = useMessages(sessionId);
  const [text, setText] = useState(drafts.get(sessionId) ?? "");
  const [mode, setMode] = useState<"queue" | "interrupt">("queue");
  const [sending, setSending] = useState(false);
  const [error, setError] = useState<unknown>();
  const uploads = useUploads();
  const picker = useRef<HTMLInputElement>(null);

  const write = (next: string) => {
    setText(next);
    drafts.set(sessionId, next);
  };
  const attach = (files: Iterable<File>) => {
    const session = client.session(sessionId);
    for (const file of files) {
      void uploads.add(file, (body, options) => session.files.put(file.name, body, options)).then((done) => {
        // The agent learns of the file by its path in the message.
        const draft = drafts.get(sessionId) ?? "";
        if (done) write(`${draft}${draft && !draft.endsWith("\n") ? "\n" : ""}${file.name}\n`);
      });
    }
  };
  const canSend = text.trim() !== "" && !sending && !uploads.isUploading;
  const send = async () => {
    if (!canSend) return;
    setSending(true);
    setError(undefined);
    try {
      write("");
      if (isRunning && mode === "interrupt") await interrupt();
      uploads.clear();
      await sendMessage(text);
    } catch (failure) {
      // What was written since stays.
      write([text, drafts.get(sessionId)].filter(Boolean).join("\n"));
      setError(failure);
    } finally {
      setSending(false);
    }
  };
  const onSubmit = (event: FormEvent) => {
    event.preventDefault();
    void send();
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || event.shiftKey || event.nativeEvent.isComposing) return;
    event.preventDefault();
    void send();
  };
  const onDrop = (event: DragEvent) => {
    if (event.dataTransfer.files.length === 0) return;
    event.preventDefault();
    attach(event.dataTransfer.files);
  };
  const onPaste = (event: ClipboardEvent) => {
    if (event.clipboardData.files.length === 0) return;
    event.preventDefault();
    attach(event.clipboardData.files);
  };

  return (
    <form className="composer" onSubmit={onSubmit} onDrop={onDrop} onDragOver={(e) => e.preventDefault()}>
      {error !== undefined && <ErrorNote error={error} />}
      <FileList uploads={uploads} />
      <textarea className="composer-text" rows={2} aria-label="Message" placeholder="Message the agent" value={text} onChange={(e) => write(e.target.value)} onKeyDown={onKeyDown} onPaste={onPaste} />
      <div className="composer-bar">
        <input ref={picker} type="file" multiple hidden onChange={(e) => (attach(e.target.files ?? []), (e.target.value = ""))} />
        <button type="button" className="button button-quiet" onClick={() => picker.current?.click()} title="Puts files into the workspace">
          Attach files
        </button>
        {isRunning && (
          <fieldset className="composer-mode">
            <legend className="visually-hidden">A turn runs. This message:</legend>
            <label>
              <input type="radio" name="mode" checked={mode === "queue"} onChange={() => setMode("queue")} /> after this turn
            </label>
            <label>
              <input type="radio" name="mode" checked={mode === "interrupt"} onChange={() => setMode("interrupt")} /> stop this <Term name="execution">turn</Term> first
            </label>
          </fieldset>
        )}
        <button className="button button-primary composer-send" disabled={!canSend}>
          {isRunning ? (mode === "queue" ? "Queue" : "Interrupt and send") : "Send"}
        </button>
      </div>
    </form>
  );
}
