import { SpoolClient } from "@spoolhq/client";
import { createContext, useContext, useMemo, type ReactNode } from "react";

/** The client of the provider; null outside of one. */
export const AgentServiceContext = createContext<SpoolClient | null>(null);

/** Properties of the provider: a client, or what makes one. */
export interface AgentServiceProviderProps {
  client: SpoolClient;
  children: ReactNode;
}

/** Provides the client to the hooks below it. */
export function AgentServiceProvider({ client, children }: AgentServiceProviderProps) {
  return <AgentServiceContext.Provider value={useMemo(() => client, [client])}>{children}</AgentServiceContext.Provider>;
}

/** Returns the client of the provider. */
export function useClient(): SpoolClient {
  const client = useContext(AgentServiceContext);
  if (!client) throw new Error("useClient: there is no AgentServiceProvider above this component");
  return client;
}
