package pgserver

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const (
	// passwordFile is the name of the file in the data folder with the password of all roles.
	passwordFile = "password"
	// accessFile is the name of the file in the cluster that replaces its pg_hba.conf. The cluster's own file, which trusts
	// all connections, is not changed: an earlier version of this package can start the cluster.
	accessFile = "pg_hba.password.conf"
)

// requirePassword sets the server's password, if the configuration requires one. It creates the password if the data
// folder has none, or an empty one, which a crash of the machine may leave.
func (s *Server) requirePassword(ctx context.Context, bins postgresBinaries) error {
	if !s.cfg.RequirePassword {
		return nil
	}
	rules := filepath.Join(s.clusterDir(), accessFile)
	err := os.WriteFile(rules, []byte("local all all scram-sha-256\n"), 0o600)
	if err == nil {
		err = s.user.chown(rules)
	}
	if err != nil {
		return fmt.Errorf("postgres: require a password: %w", err)
	}
	path := filepath.Join(s.cfg.DataDir, passwordFile)
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("postgres: read the password: %w", err)
	}
	if s.password = strings.TrimSpace(string(text)); s.password != "" {
		return nil
	}
	password := rand.Text()
	if err := s.setPassword(ctx, bins, password); err != nil {
		return fmt.Errorf("postgres: set the password: %w", err)
	}
	// Written last: if the process ends before, the next start sets another password.
	if err := writePrivateFile(path, password+"\n"); err != nil {
		return fmt.Errorf("postgres: store the password: %w", err)
	}
	s.password = password
	return nil
}

// setPassword sets the password of the superuser of a cluster on which no server runs.
func (s *Server) setPassword(ctx context.Context, bins postgresBinaries, password string) error {
	cmd := exec.CommandContext(ctx, bins.postgres, "--single", "-D", s.pathForPostgres(), "-c", "password_encryption=scram-sha-256", "postgres")
	s.prepareCommand(cmd)
	var out bytes.Buffer
	cmd.Stdin = strings.NewReader(fmt.Sprintf("ALTER ROLE %s PASSWORD '%s'\n", User, password))
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	if said := out.String(); err == nil && (strings.Contains(said, "ERROR:") || strings.Contains(said, "FATAL:")) { // also ends with status 0
		err = errors.New("the command failed")
	}
	if err != nil {
		return fmt.Errorf("%w: %s", err, strings.ReplaceAll(lastLines(out.String()), password, "…"))
	}
	return nil
}

// writePrivateFile creates a file that only its owner can read, in one step.
func writePrivateFile(path, text string) error {
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
