import { useEffect, useState, type ReactNode } from "react";

/** Returns the definition of a term in docs/glossary.md, without its Markdown. */
async function definitionOf(term: string): Promise<string | undefined> {
  const { default: page } = await import("../../docs/glossary.md?raw");
  const row = page.split("\n").find((line) => line.startsWith(`| ${term} | `));
  return row?.split(" | ")[1]?.replaceAll("`", "");
}

/** A word of Spool, with its definition as a tooltip. */
export function Term({ name, children = name }: { name: string; children?: ReactNode }) {
  const [definition, setDefinition] = useState<string>();
  useEffect(() => {
    let active = true;
    void definitionOf(name).then((d) => active && setDefinition(d));
    return () => {
      active = false;
    };
  }, [name]);
  return <abbr title={definition}>{children}</abbr>;
}
