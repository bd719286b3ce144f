import { SpoolClient } from "@spoolhq/client";

/** The path under which the gateway serves the page and the API, without a slash at its end. */
export const basePath = new URL(".", document.baseURI).pathname.replace(/\/$/, "");

/** Returns a client of the gateway that served the page. `onUnauthenticated` is called when the gateway refuses the sign-in. */
export function newClient(onUnauthenticated: () => void): SpoolClient {
  return new SpoolClient({
    baseUrl: location.origin + basePath,
    fetch: async (input, init) => {
      const response = await fetch(input, init);
      if (response.status === 401) onUnauthenticated();
      return response;
    },
  });
}

/** Returns the URL of a file of a session's workspace, for a link. */
export function fileUrl(sessionId: string, path: string, live: boolean): string {
  const encoded = path.split("/").map(encodeURIComponent).join("/");
  return `${basePath}/api/sessions/${encodeURIComponent(sessionId)}/files/${encoded}${live ? "?live=true" : ""}`;
}
