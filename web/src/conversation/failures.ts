/** The page that describes the codes of failures. */
export const failuresUrl = "https://github.com/spoolhq/spool/blob/main/docs/failures.md";

/** Returns what a code of a failure means and what to do, as Markdown; undefined if docs/failures.md does not have the code. */
export async function remedyOf(code: string): Promise<string | undefined> {
  const { default: page } = await import("../../../docs/failures.md?raw");
  for (const line of page.split("\n")) {
    const [, codes, meaning] = /^\| ([A-Z_, ]+) \| (.*) \|$/.exec(line) ?? [];
    if (codes?.split(", ").includes(code)) return meaning;
  }
  return undefined;
}
