import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { App } from "./app";
import { takeCode } from "./signin";
import { restoreTheme } from "./theme";
import "./tokens.css";
import "./base.css";

restoreTheme();
const code = takeCode();
createRoot(document.getElementById("root")!).render(
  <StrictMode>
    <App code={code} />
  </StrictMode>,
);
