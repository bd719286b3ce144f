import hljs from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import go from "highlight.js/lib/languages/go";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import type { CodePart } from "./code";

// This file is a chunk of its own, which is loaded with the first code.
const languages = { bash, css, diff, go, java, javascript, json, python, rust, sql, typescript, xml, yaml };
for (const [name, language] of Object.entries(languages)) hljs.registerLanguage(name, language);

/** Returns code in parts with the names of what they are; undefined if the language is not known. */
export function highlight(text: string, language: string): CodePart[] | undefined {
  const name = language.trim().split(/\s/)[0]!.toLowerCase();
  if (!hljs.getLanguage(name)) return undefined;
  // The emitter holds a tree of texts, from which no HTML has been made.
  const { _emitter: emitter } = hljs.highlight(text, { language: name, ignoreIllegals: true });
  return (emitter as unknown as { rootNode: { children: CodePart[] } }).rootNode.children;
}
