import { useState } from "react";
import { readSetting, writeSetting } from "./settings";

const themes = ["system", "light", "dark"] as const;
type Theme = (typeof themes)[number];

function applyTheme(theme: Theme): void {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

/** Returns the theme that was chosen in this browser, and applies it. */
export function restoreTheme(): Theme {
  const theme = themes.find((t) => t === readSetting("theme")) ?? "system";
  applyTheme(theme);
  return theme;
}

/** The choice of a theme. */
export function ThemeSelect() {
  const [theme, setTheme] = useState(restoreTheme);
  const choose = (next: Theme) => {
    setTheme(next);
    applyTheme(next);
    writeSetting("theme", next === "system" ? undefined : next);
  };
  return (
    <select className="theme-select" aria-label="Theme" value={theme} onChange={(e) => choose(e.target.value as Theme)}>
      <option value="system">System theme</option>
      <option value="light">Light theme</option>
      <option value="dark">Dark theme</option>
    </select>
  );
}
