import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

export default defineConfig({
  // The page is served below any path prefix.
  base: "./",
  plugins: [react()],
  build: {
    target: "es2022",
    // The polyfill is an inline script, which the content security policy forbids.
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
  },
});
