import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

/** A page for development: npx vite --config web/dev/vite.config.ts web/dev */
export default defineConfig({
  plugins: [react()],
  server: { fs: { allow: ["../.."] } },
});
