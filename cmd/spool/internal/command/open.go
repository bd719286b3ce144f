package command

import (
	"context"
	"strings"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
)

type openCommand struct{ serverFlags }

// Run prints the URL with which the inspector signs in. The code is in the fragment of the URL: browsers do not send the
// fragment to servers, so the code is in no log of a server or proxy.
func (c *openCommand) Run(a *app) error {
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		doc, err := client.Call(ctx, cl.SignIn.CreateSignInCode, &spoolv1.CreateSignInCodeRequest{})
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(doc)
		}
		prefix, err := cl.PathPrefix(ctx)
		if err != nil {
			return err
		}
		_, err = terminal.Fprintln(a.Out, pageURL(cl.URL(), prefix)+"#code="+doc.Value.GetCode())
		return err
	})
}

// pageURL returns the URL of the page of a gateway with a path prefix. Commands also reach a gateway without its prefix;
// the page works below the prefix only.
func pageURL(gateway, prefix string) string {
	return strings.TrimSuffix(gateway, prefix) + prefix + "/"
}
