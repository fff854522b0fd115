// What the type checker has to know about the page beside the answers that `answers.py` writes.

type Part<P extends string> = string extends P ? "{}" : P;
type Parts<P extends string> = P extends `${infer A}/${infer B}` ? `${Part<A>}/${Parts<B>}` : Part<P>;
type Bare<P extends string> = P extends `${infer A}?${string}` ? A : P;
type Found<K> = K extends keyof Api.Answers ? Api.Answers[K] : never;
/**
 * The type of an answer by its path: `Answer<"GET", "/v1/jobs/${string}?x">` is that of "GET /v1/jobs/{}". A path that
 * begins with a variable gives any type. One that the API does not have gives `never`, with which nothing can be done.
 */
type Answer<M extends string, P extends string> = P extends `/v1/${string}` ? Found<`${M} ${Parts<Bare<P>>}`> : any;

// A selector names a class, not a kind of element.
interface ParentNode {
  querySelector(selectors: string): any;
  querySelectorAll(selectors: string): NodeListOf<any>;
}
interface Element {
  closest(selectors: string): any;
}
interface HTMLElement {
  csv?: () => unknown[][]; // the figures that a chart or a table has, for a file
}
interface Window {
  shoalMap?: object; // for tests: a canvas cannot be asked what it shows
  shoalTime?: object;
}
