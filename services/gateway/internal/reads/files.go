package reads

import "context"

// FileChanges returns, by path, the execution that changed each existing file last, if the log recorded it.
func (s *Store) FileChanges(ctx context.Context, tenant, session string) (map[string]string, error) {
	out := map[string]string{}
	err := s.rows(ctx, func(r row) error {
		var path, execution string
		err := r.Scan(&path, &execution)
		out[path] = execution
		return err
	}, "SELECT path, execution FROM files WHERE tenant = $1 AND session = $2 AND NOT deleted AND execution <> ''", tenant, session)
	return out, err
}
