package server

// Settings are the flags of the program mockllm and the environment variables that set them.
type Settings struct {
	Listen string `default:"127.0.0.1:7799" env:"SPOOL_MOCKLLM_LISTEN" help:"Address to listen on."`
	Script string `env:"SPOOL_MOCKLLM_SCRIPT" help:"Script in YAML or JSON; without one, the built-in script."`
}
