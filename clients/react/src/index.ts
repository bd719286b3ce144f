export { AgentServiceContext, AgentServiceProvider, useClient, type AgentServiceProviderProps } from "./provider.js";
