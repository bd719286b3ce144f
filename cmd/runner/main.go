// Command runner is the static binary that runs in every sandbox. It supervises the agents in the sandbox and journals
// what they do.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spoolhq/spool/cmd/runner/internal/account"
	"github.com/spoolhq/spool/cmd/runner/internal/cli"
	"github.com/spoolhq/spool/pkg/landlock"
	"github.com/spoolhq/spool/pkg/runner"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == runner.RestrictedCommand {
		fmt.Fprintln(os.Stderr, "runner:", landlock.Exec(os.Args[2:]))
		os.Exit(1)
	}
	if err := account.SwitchUser(os.Getenv(account.UserVariable)); err != nil {
		fmt.Fprintln(os.Stderr, "runner:", err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code := cli.Run(ctx, os.Args[1:], cli.ProcessSystem())
	stop()
	os.Exit(code)
}
