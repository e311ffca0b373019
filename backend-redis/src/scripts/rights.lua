#!lua flags=no-writes
-- Which commands the user may not run; none is run.
-- ARGV: for each command the number of its words, then the words
-- Returns the numbers of those that are forbidden.
local forbidden, at, n = {}, 1, 0
while ARGV[at] do
  local words = {}
  for i = 1, tonumber(ARGV[at]) do words[i] = ARGV[at + i] end
  at = at + 1 + #words
  n = n + 1
  -- a server that does not know the command has nothing to forbid
  local known, allowed = pcall(redis.acl_check_cmd, unpack(words))
  if known and not allowed then forbidden[#forbidden + 1] = n end
end
return forbidden
