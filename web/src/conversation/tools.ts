/** What a call of a tool does, as far as its arguments show it. It chooses the icon of the row. */
export type ToolKind = "command" | "edit" | "read" | "search" | "web" | "plan" | "agent" | "question" | "skill" | "other";

/** A tool call on one line. */
export interface ToolSummary {
  kind: ToolKind;
  name: string;
  /** The argument that matters: a command, a path, a pattern, a URL. Empty if there is none. */
  argument: string;
}

/** A change of a file in the arguments of a call. */
export interface FileChange {
  path: string;
  /** The new path of a file that is moved. */
  movedTo?: string;
  action: "add" | "write" | "edit" | "delete";
  /** The texts that are replaced and that replace them; both are parts of the file with "edit". */
  before?: string;
  after?: string;
  /** The change as hunks of a unified diff, in place of before and after. */
  patch?: string;
}

/** The fields of a tool_use block that a summary needs. */
interface Call {
  toolName?: string;
  displayName?: string;
  description?: string;
  input?: unknown;
}

type Arguments = Record<string, unknown>;

const pathNames = ["file_path", "filePath", "path", "absolute_path", "notebook_path", "target_file", "filename", "dir_path"];
const oldNames = ["old_string", "oldString", "old_str", "oldText"];
const newNames = ["new_string", "newString", "new_str", "newText"];
const contentNames = ["content", "file_text", "new_source", "contents"];

/** Returns the arguments of a call; an empty object if they are not a JSON object. */
function argumentsOf(input: unknown): Arguments {
  return typeof input === "object" && input !== null && !Array.isArray(input) ? (input as Arguments) : {};
}

/** Returns the first argument with one of the names that is a text. */
function text(args: Arguments, ...names: string[]): string | undefined {
  for (const name of names) if (typeof args[name] === "string") return args[name];
  return undefined;
}

/** Returns the command of a call, without the shell that Codex runs it in. */
export function commandOf(input: unknown): string | undefined {
  const args = argumentsOf(input);
  const list = args["command"];
  if (Array.isArray(list)) {
    const words = list.filter((word) => typeof word === "string");
    return /^(\/\w+)*\/?(ba|z|)sh$/.test(words[0] ?? "") && words.length === 3 ? words[2] : words.join(" ");
  }
  const command = text(args, "command", "cmd", "script", "code");
  const quoted = command && /^(?:\/\w+)*\/?(?:ba|z|)sh -l?c '([^']*)'$/.exec(command);
  return quoted ? quoted[1] : command;
}

/** Returns the changes of files that a call makes; none if it changes no file, or its arguments do not show the change. */
export function fileChanges(toolName: string | undefined, input: unknown): FileChange[] {
  const args = argumentsOf(input);
  if (Array.isArray(args["changes"])) return args["changes"].flatMap((change) => codexChange(argumentsOf(change)));
  const patch = text(args, "patchText", "patch", "input");
  if (patch?.startsWith("*** Begin Patch")) return parsePatchText(patch);
  const path = text(args, ...pathNames);
  if (path === undefined) return [];
  const after = text(args, ...newNames);
  if (after !== undefined) return [{ path, action: "edit", before: text(args, ...oldNames) ?? "", after }];
  if (Array.isArray(args["edits"])) {
    return args["edits"].map(argumentsOf).map((edit) => ({ path, action: "edit", before: text(edit, ...oldNames) ?? "", after: text(edit, ...newNames) ?? "" }));
  }
  const content = text(args, ...contentNames);
  return content !== undefined && /write|create|edit|save|put/i.test(toolName ?? "") ? [{ path, action: "write", after: content }] : [];
}

/** Returns a file change as Codex reports it: the content of a file that is added or deleted, or a unified diff. */
function codexChange(change: Arguments): FileChange[] {
  const path = text(change, "path");
  const diff = text(change, "diff") ?? "";
  const kind = argumentsOf(change["kind"]);
  const type = text(kind, "type") ?? text(change, "kind");
  if (path === undefined) return [];
  if (type === "add") return [{ path, action: "add", after: diff }];
  if (type === "delete") return [{ path, action: "delete", before: diff }];
  const movedTo = text(kind, "move_path");
  return [{ path, action: "edit", patch: diff, ...(movedTo ? { movedTo } : {}) }];
}

/** Parses the text of apply_patch, which names each file in a line such as "*** Update File: a.txt". */
function parsePatchText(patch: string): FileChange[] {
  const changes: FileChange[] = [];
  for (const section of patch.split(/^(?=\*\*\* (?:Add|Update|Delete) File: )/m).slice(1)) {
    const [head = "", ...lines] = section.replace(/^\*\*\* End (?:Patch|of File)\s*$/gm, "").replace(/\n+$/, "").split("\n");
    const [, verb, path = ""] = /^\*\*\* (Add|Update|Delete) File: (.*)$/.exec(head) ?? [];
    const move = /^\*\*\* Move to: (.*)$/.exec(lines[0] ?? "");
    if (move) lines.shift();
    if (verb === "Add") changes.push({ path, action: "add", after: lines.map((line) => line.replace(/^\+/, "")).join("\n") });
    else if (verb === "Delete") changes.push({ path, action: "delete", before: "" });
    else changes.push({ path, action: "edit", patch: lines.join("\n"), ...(move ? { movedTo: move[1] } : {}) });
  }
  return changes;
}

/** Returns a call on one line. */
export function summarize(call: Call): ToolSummary {
  const args = argumentsOf(call.input);
  const tool = call.toolName ?? "";
  const mcp = /^mcp__(.+?)__(.+)$/.exec(tool);
  const name = mcp ? `${mcp[1]} · ${mcp[2]}` : call.displayName || tool || "Tool";
  const of = (kind: ToolKind, argument: string | undefined): ToolSummary => ({ kind, name, argument: firstLine(argument || call.description || "") });

  if (/^(AskUserQuestion|request_user_input|question)$/i.test(tool)) return of("question", firstQuestion(args));
  if (/^(exit_?plan_?mode|enter_?plan_?mode|todo_?write|todo_?read|update_plan|task_?(create|update|list|get))$/i.test(tool)) return of("plan", text(args, "subject"));
  if (/^skill$/i.test(tool)) return of("skill", text(args, "skill", "name"));
  if (/^(task|agent|spawn_agent|wait|send_input|close_agent)$/i.test(tool)) return of("agent", call.description || text(args, "description", "prompt"));

  const changes = fileChanges(tool, call.input);
  if (changes.length > 0) return of("edit", changes.map(changeLabel).join(", "));
  const command = commandOf(call.input);
  if (command !== undefined) return of("command", command);
  const url = text(args, "url", "uri");
  if (url !== undefined) return of("web", url);
  const query = text(args, "pattern", "query", "regex");
  if (query !== undefined) return of(/web/i.test(tool) ? "web" : "search", [query, text(args, ...pathNames)].filter(Boolean).join("  in "));
  const path = text(args, ...pathNames);
  if (path !== undefined) return of(/edit|write|delete|move|create/i.test(tool) ? "edit" : "read", withoutWorkspace(path));
  return of("other", call.description || Object.values(args).find((value): value is string => typeof value === "string"));
}

function changeLabel(change: FileChange): string {
  const path = withoutWorkspace(change.path);
  return change.movedTo ? `${path} → ${withoutWorkspace(change.movedTo)}` : path;
}

/** Returns a path without the folder of the workspace, which is the same for all files of a session. */
function withoutWorkspace(path: string): string {
  return path.replace(/^(?:\/[^\0]*)?\/workspaces\/ses_[0-9A-Z]+\/|^\/workspace\//, "");
}

function firstQuestion(args: Arguments): string | undefined {
  const questions = args["questions"];
  return Array.isArray(questions) ? text(argumentsOf(questions[0]), "question") : text(args, "question");
}

/** Returns the first line of a text that is not blank, up to 400 characters. The text itself may be very long. */
function firstLine(value: string): string {
  const start = value.slice(0, 4096).trimStart();
  const end = start.indexOf("\n");
  return (end < 0 ? start : start.slice(0, end)).slice(0, 400);
}
