package reads

import "context"

// FileChanges returns, by path, the execution that changed each existing file last, if the log recorded it.
func (s *Store) FileChanges(ctx context.Context, tenant, session string) (map[string]string, error) {
	rows, err := s.queries.FileChanges(ctx, tenant, session)
	out := map[string]string{}
	for _, r := range rows {
		out[r.Path] = r.Execution
	}
	return out, err
}
