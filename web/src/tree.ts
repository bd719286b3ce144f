import type { Schemas } from "@spoolhq/client";

/** A visible row of a tree of files. */
export interface TreeRow {
  path: string;
  name: string;
  depth: number;
  isFolder: boolean;
  size: number;
}

interface Folder {
  path: string;
  folders: Map<string, Folder>;
  files: TreeRow[];
}

/** Returns the rows of a list of files: folders before files, and what is below a folder only if its path is in `opened`. */
export function flattenTree(files: readonly Pick<Schemas["FileEntry"], "path" | "kind" | "size">[], opened: ReadonlySet<string>): TreeRow[] {
  const root: Folder = { path: "", folders: new Map(), files: [] };
  for (const { path, kind, size } of files) {
    const names = path.split("/");
    const last = kind === "dir" ? undefined : names.pop();
    let folder = root;
    for (const name of names) {
      let next = folder.folders.get(name);
      if (!next) folder.folders.set(name, (next = { path: folder.path ? `${folder.path}/${name}` : name, folders: new Map(), files: [] }));
      folder = next;
    }
    if (last !== undefined) folder.files.push({ path, name: last, depth: names.length, isFolder: false, size });
  }
  const rows: TreeRow[] = [];
  // A stack instead of recursion: a path may have thousands of folders.
  const stack: (TreeRow | { folder: Folder; depth: number; name: string })[] = [];
  const pushContent = (folder: Folder, depth: number) => {
    const byName = (a: string, b: string) => (a < b ? 1 : -1); // the last one pushed comes first
    for (const file of [...folder.files].sort((a, b) => byName(a.name, b.name))) stack.push(file);
    for (const [name, inner] of [...folder.folders].sort(([a], [b]) => byName(a, b))) stack.push({ folder: inner, depth, name });
  };
  pushContent(root, 0);
  for (let item = stack.pop(); item; item = stack.pop()) {
    if (!("folder" in item)) {
      rows.push(item);
      continue;
    }
    const { folder, depth, name } = item;
    rows.push({ path: folder.path, name, depth, isFolder: true, size: 0 });
    if (opened.has(folder.path)) pushContent(folder, depth + 1);
  }
  return rows;
}
