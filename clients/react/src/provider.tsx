import { SpoolClient } from "@spoolhq/client";
import { createContext, useContext, useMemo, type ReactNode } from "react";

/** The client of the provider; null outside of one. */
export const AgentServiceContext = createContext<SpoolClient | null>(null);

/** Properties of the provider: a client, or the settings of one. */
export type AgentServiceProviderProps = { children?: ReactNode } & (
  | { client: SpoolClient }
  | {
      client?: undefined;
      /** The URL of the gateway. */
      apiUrl: string;
      /** The URL of the gateway's WebSocket; streams use SSE without it. */
      wsUrl?: string;
      apiKey?: string;
      /** Whether requests and their failures are written to the console. */
      debug?: boolean;
    }
);

/** Provides a client to the hooks below it. */
export function AgentServiceProvider(props: AgentServiceProviderProps) {
  const { client, apiUrl, wsUrl, apiKey, debug } = { apiUrl: "", wsUrl: undefined, apiKey: undefined, debug: false, ...props };
  const value = useMemo(() => client ?? newClient(apiUrl, wsUrl, apiKey, debug), [client, apiUrl, wsUrl, apiKey, debug]);
  return <AgentServiceContext.Provider value={value}>{props.children}</AgentServiceContext.Provider>;
}

/** Returns the client of the provider. */
export function useClient(): SpoolClient {
  const client = useContext(AgentServiceContext);
  if (!client) throw new Error("useClient: there is no AgentServiceProvider above this component");
  return client;
}

function newClient(apiUrl: string, wsUrl: string | undefined, apiKey: string | undefined, debug: boolean): SpoolClient {
  return new SpoolClient({
    baseUrl: apiUrl,
    ...(apiKey && { apiKey }),
    ...(wsUrl && { webSocketUrl: wsUrl, transport: "websocket" as const }),
    ...(debug && { fetch: loggedFetch }),
  });
}

async function loggedFetch(input: RequestInfo | URL, init?: RequestInit): Promise<Response> {
  const what = `spool: ${init?.method ?? "GET"} ${String(input)}`;
  try {
    const response = await fetch(input, init);
    console.debug(what, response.status);
    return response;
  } catch (error) {
    console.debug(what, error);
    throw error;
  }
}
