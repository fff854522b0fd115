// A real OpenID provider on loopback: npm's oidc-provider, as it comes, with its own pages to sign in.
//
// The first line on stdin is its settings: {"clients": [...], "people": {name: claims}, "algorithms": ["RS256"]}.
// Each further line changes some of them (new "algorithms" are new keys). Each is answered by a line.
import { generateKeyPairSync } from "node:crypto";
import http from "node:http";
import readline from "node:readline";
import Provider from "oidc-provider";

const KINDS = {
  RS256: ["rsa", { modulusLength: 2048 }],
  PS256: ["rsa", { modulusLength: 2048 }],
  ES256: ["ec", { namedCurve: "P-256" }],
  EdDSA: ["ed25519", {}],
};
console.info = console.warn = console.error; // its hints: stdout is for answers
const settings = {};
let answer = null;
let rotations = 0;

const server = http.createServer((request, response) => answer(request, response));
server.listen(0, "127.0.0.1", () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  readline.createInterface({ input: process.stdin }).on("line", (line) => {
    const change = JSON.parse(line);
    Object.assign(settings, change);
    if (change.algorithms) settings.keys = change.algorithms.map(newKey);
    answer = provider(issuer).callback();
    process.stdout.write(`${JSON.stringify({ issuer })}\n`);
  }).on("close", () => process.exit(0));
});

// As providers do it, a key for signatures names no algorithm: a key for RSA serves RS256 and PS256.
function newKey(algorithm) {
  const [kind, options] = KINDS[algorithm];
  const key = generateKeyPairSync(kind, options).privateKey.export({ format: "jwk" });
  return { ...key, kid: `${algorithm}-${++rotations}`, use: "sig" };
}

function provider(issuer) {
  const made = new Provider(issuer, {
    clients: settings.clients,
    jwks: { keys: settings.keys },
    cookies: { keys: ["a key that outlives a change of settings"] },
    claims: { openid: ["sub"], profile: ["preferred_username"], email: ["email"], groups: ["groups"] },
    features: { deviceFlow: { enabled: true } },
    // Its default is the standard's: what a scope stands for is told by the userinfo endpoint.
    conformIdTokenClaims: settings.conform ?? true,
    findAccount: (_, id) => {
      const person = settings.people[id];
      return person && { accountId: person.sub, claims: () => person };
    },
  });
  made.on("server_error", (_, error) => console.error(error));
  return made;
}
