import { Component, type ReactNode } from "react";
import { ErrorNote } from "./error";

/** Contains a failure to draw its children: a note takes their place, and the rest of the page goes on. */
export class Boundary extends Component<{ children: ReactNode }, { error?: unknown }> {
  override state: { error?: unknown } = {};

  static getDerivedStateFromError(error: unknown) {
    return { error: new Error(`This part cannot be shown: ${error instanceof Error ? error.message : String(error)}`) };
  }

  override render() {
    if (this.state.error === undefined) return this.props.children;
    return <ErrorNote error={this.state.error} onRetry={() => this.setState({ error: undefined })} />;
  }
}
