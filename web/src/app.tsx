/** The inspector. */
export function App() {
  return <main>Spool</main>;
}
