import "./tokens.css";
import "./base.css";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { App } from "./app";
import { takeCode } from "./signin";
import { restoreTheme } from "./theme";

restoreTheme();
const code = takeCode();
createRoot(document.getElementById("root")!).render(
  <StrictMode>
    <App code={code} />
  </StrictMode>,
);
