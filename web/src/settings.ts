/** Returns a setting of this browser; undefined if there is none, or if the browser refuses storage. */
export function readSetting(name: string): string | undefined {
  try {
    return localStorage.getItem(`spool.${name}`) ?? undefined;
  } catch {
    return undefined; // the page works without its settings
  }
}

/** Stores a setting of this browser, or removes it. */
export function writeSetting(name: string, value: string | undefined): void {
  try {
    if (value === undefined) localStorage.removeItem(`spool.${name}`);
    else localStorage.setItem(`spool.${name}`, value);
  } catch {
    // The setting lasts until the page is closed.
  }
}
