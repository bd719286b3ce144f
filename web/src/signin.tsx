import { SpoolError, type SpoolClient } from "@spoolhq/client";
import { useCallback, useEffect, useMemo, useRef, useState, type FormEvent } from "react";
import { newClient } from "./client";
import { ErrorNote } from "./error";
import "./signin.css";

type SignInState =
  | { status: "checking" }
  /** `ended` says that a session has ended while the page was open: what it shows stays. */
  | { status: "signed_in"; ended: boolean; withKey: boolean }
  | { status: "signed_out"; error?: unknown };

export interface SignIn {
  state: SignInState;
  client: SpoolClient;
  signIn: (apiKey: string) => Promise<void>;
  signOut: () => Promise<void>;
  /** Shows that the session of the sign-in has ended. */
  end: () => void;
  retry: () => void;
}

/** Returns the code of a sign-in link (#code=…), and removes it from the URL and from the history. */
export function takeCode(): string | undefined {
  const code = new URLSearchParams(location.hash.slice(1)).get("code") ?? undefined;
  if (code !== undefined) history.replaceState(null, "", location.pathname + location.search);
  return code;
}

/** Holds the sign-in of the page: with a code of a link, with the cookie of an earlier sign-in, or with a key. */
export function useSignIn(code: string | undefined): SignIn {
  const [state, setState] = useState<SignInState>({ status: "checking" });
  const [generation, setGeneration] = useState(0);
  const end = useCallback(() => setState((s) => (s.status === "signed_in" ? { ...s, ended: true } : s)), []);
  // A new sign-in gets a new client, so that streams that had ended are opened again.
  const client = useMemo(() => newClient(end), [generation, end]);
  const pending = useRef(code);

  useEffect(() => {
    let active = true;
    const start = async (): Promise<SignInState> => {
      const proof = pending.current;
      pending.current = undefined; // a code can be exchanged once
      try {
        if (proof !== undefined) await client.signIn({ code: proof });
        const session = await client.signInSession();
        return { status: "signed_in", ended: false, withKey: session.expiresAt !== undefined };
      } catch (error) {
        const isMissing = proof === undefined && error instanceof SpoolError && error.status === 401;
        return { status: "signed_out", ...(!isMissing && { error }) };
      }
    };
    // StrictMode runs effects twice: the exchange belongs to the second run.
    const timer = setTimeout(() => void start().then((next) => active && setState(next)));
    return () => {
      active = false;
      clearTimeout(timer);
    };
  }, [client]);

  return {
    state,
    client,
    signIn: async (apiKey) => {
      await client.signIn({ apiKey });
      setGeneration((n) => n + 1);
    },
    signOut: async () => {
      await client.signOut();
      setState({ status: "signed_out" });
    },
    end,
    retry: () => setGeneration((n) => n + 1),
  };
}

/** The form that signs in with an API key. */
export function SignInForm({ signIn, error: initialError }: { signIn: SignIn["signIn"]; error?: unknown }) {
  const [key, setKey] = useState("");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(initialError);
  const submit = async (event: FormEvent) => {
    event.preventDefault();
    setBusy(true);
    setError(undefined);
    try {
      await signIn(key.trim());
    } catch (failure) {
      setError(failure);
    } finally {
      setBusy(false);
    }
  };
  return (
    <form className="signin-form" onSubmit={submit}>
      <label className="field">
        <span className="field-label">API key</span>
        <input className="input" type="password" autoComplete="current-password" spellCheck={false} required value={key} onChange={(e) => setKey(e.target.value)} placeholder="spool_sk_…" />
      </label>
      <button className="button button-primary" disabled={busy || !key.trim()}>
        {busy ? "Signing in…" : "Sign in"}
      </button>
      {error !== undefined && <ErrorNote error={error} />}
    </form>
  );
}

/** What a person sees who is not signed in. */
export function SignInPage({ signIn, retry, error }: { signIn: SignIn["signIn"]; retry: () => void; error?: unknown }) {
  const isRefused = error === undefined || error instanceof SpoolError;
  return (
    <main className="signin-page">
      <h1>Sign in to Spool</h1>
      {isRefused ? (
        <>
          <SignInForm signIn={signIn} error={error} />
          <p className="muted">
            On the machine that runs <code>spool up</code>, this command prints a key:
          </p>
          <pre className="signin-command">spool keys local</pre>
        </>
      ) : (
        <ErrorNote error={error} onRetry={retry} />
      )}
    </main>
  );
}

/** The line above a page whose sign-in has ended. */
export function SignedOutNote({ signIn }: { signIn: SignIn["signIn"] }) {
  return (
    <section className="signin-note" role="alert">
      <p>
        <strong>You are signed out.</strong> The session has ended, or its key was revoked. What this page shows stays, but it is no longer live.
      </p>
      <SignInForm signIn={signIn} />
    </section>
  );
}
