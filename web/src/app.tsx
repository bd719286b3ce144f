import { AgentServiceProvider, useApprovals } from "@spoolhq/react";
import { useState } from "react";
import { Link, Router, useRoute } from "wouter";
import { ApprovalsPage, useApprovalNotices } from "./approvals";
import { Boundary } from "./boundary";
import { basePath } from "./client";
import { ErrorNote } from "./error";
import { Help, useKeys } from "./help";
import { Layout } from "./layout";
import { useParameters } from "./location";
import { NewSessionPage } from "./newsession";
import { Panel } from "./panel";
import { SessionPage } from "./session";
import { SessionList } from "./sessions";
import { SignedOutNote, SignInPage, useSignIn, type SignIn } from "./signin";
import { ThemeSelect } from "./theme";
import "./app.css";

/** The inspector. `code` is the code of a sign-in link. */
export function App({ code }: { code: string | undefined }) {
  const auth = useSignIn(code);
  const { state, client, signIn, retry } = auth;
  if (state.status === "checking") return null;
  if (state.status === "signed_out") return <SignInPage key={String(state.error)} signIn={signIn} retry={retry} error={state.error} />;
  return (
    <AgentServiceProvider client={client}>
      <Router base={basePath}>
        <Page auth={auth} />
      </Router>
    </AgentServiceProvider>
  );
}

function Page({ auth: { state, signIn, signOut, end } }: { auth: SignIn }) {
  const [, route] = useRoute("/sessions/:id");
  const [isNew] = useRoute("/new");
  const [isApprovals] = useRoute("/approvals");
  const [isHome] = useRoute("/");
  const { parameters, set } = useParameters();
  const [isHelpOpen, setHelpOpen] = useState(false);
  const { approvals, count } = useApprovals();
  useApprovalNotices(approvals);
  const closePanel = () => set({ tab: undefined });
  useKeys({ onHelp: () => setHelpOpen(true), onEscape: () => parameters.has("tab") && closePanel() });
  const sessionId = route?.id;
  const signedIn = state.status === "signed_in" ? state : undefined;

  return (
    <>
      <Layout
        notice={signedIn?.ended && <SignedOutNote signIn={signIn} />}
        narrow={isHome ? "sessions" : "main"}
        sessions={
          <>
            <Head approvals={count} />
            <SessionList current={sessionId} onSignedOut={end}>
              <ThemeSelect />
              <button className="button button-quiet" aria-label="Keys" onClick={() => setHelpOpen(true)}>
                ?
              </button>
              {signedIn?.withKey && !signedIn.ended && (
                <SignOut signOut={signOut} />
              )}
            </SessionList>
          </>
        }
        panel={
          sessionId && (
            <Boundary key={sessionId}>
              <Panel sessionId={sessionId} />
            </Boundary>
          )
        }
        drawerOpen={parameters.has("tab")}
        onDrawerClose={closePanel}
      >
        <Boundary key={sessionId ?? String([isNew, isApprovals, isHome])}>
          {sessionId ? <SessionPage key={sessionId} id={sessionId} /> : isNew ? <NewSessionPage /> : isApprovals ? <ApprovalsPage /> : isHome ? <Home /> : <NoPage />}
        </Boundary>
      </Layout>
      <Help isOpen={isHelpOpen} onClose={() => setHelpOpen(false)} />
    </>
  );
}

function SignOut({ signOut }: { signOut: () => Promise<void> }) {
  const [error, setError] = useState<unknown>();
  return (
    <>
      <button className="button button-quiet" onClick={() => void signOut().catch(setError)}>
        Sign out
      </button>
      {error !== undefined && <ErrorNote error={error} />}
    </>
  );
}

function Head({ approvals }: { approvals: number }) {
  const { linkTo } = useParameters();
  return (
    <header className="app-head">
      <Link href={linkTo("/")} className="app-name">
        Spool
      </Link>
      <Link href={linkTo("/approvals")} className={(active) => `button button-quiet ${active ? "app-active" : ""}`}>
        Approvals {approvals > 0 && <strong className="app-badge">{approvals}</strong>}
      </Link>
      <Link href={linkTo("/new")} className="button">
        New session
      </Link>
    </header>
  );
}

/** What is beside the list while no session is open. */
function Home() {
  const { linkTo } = useParameters();
  return (
    <section className="app-home">
      <h1>No session is open</h1>
      <p>
        Choose one in the list, or <Link href={linkTo("/new")}>start a new one</Link>.
      </p>
      <p className="muted">
        <kbd>?</kbd> lists the keys.
      </p>
    </section>
  );
}

function NoPage() {
  const { linkTo } = useParameters();
  return (
    <section className="app-home">
      <h1>There is no such page</h1>
      <p>
        <Link href={linkTo("/")}>Show the sessions</Link>
      </p>
    </section>
  );
}
