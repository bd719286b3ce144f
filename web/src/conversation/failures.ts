/** The page that describes the codes of failures. */
export const failuresUrl = "https://github.com/spoolhq/spool/blob/main/docs/failures.md";

let remedies: ReadonlyMap<string, string> | undefined;

/** Loads what the codes of failures mean and what to do: docs/failures.md, in a chunk of its own. */
export async function loadRemedies(): Promise<void> {
  const { default: page } = await import("../../../docs/failures.md?raw");
  const rows = page.matchAll(/^\| ([A-Z_, ]+) \| (.*) \|$/gm);
  remedies = new Map([...rows].flatMap(([, codes, meaning]) => codes!.split(", ").map((code): [string, string] => [code, meaning!])));
}

/** Returns the meaning of a code as Markdown; "" if there is none, undefined until loadRemedies has ended. */
export function remedyOf(code: string): string | undefined {
  return remedies && (remedies.get(code) ?? "");
}
