#!lua flags=allow-oom
-- Makes a new token for a lock of an owner: within a process a lock is handed on without a trip to
-- the server, and who got it asks for its token here. Runs on a server without free memory as well.
-- KEYS: 1 the last token, 2 the lock
-- ARGV: 1 owner, 2 how long to keep the last token in ms
-- Returns the token (text), or 0 if the owner does not hold the lock.
-- What a lock and a last token are, says acquire.lua.
local held = redis.pcall('GET', KEYS[2])
if type(held) ~= 'string' or string.sub(held, 1, 32) ~= ARGV[1] then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local last, till = string.match(redis.call('GET', KEYS[1]) or '0', '^(%d+)!?(%d*)')
-- the lock's own, too: a server may have lost the last one
local token = math.max(now, last + 1, string.match(held, ':(%d+)', 33) + 1)
local text = string.format('%.0f', token)
local marks = till ~= '' and tonumber(till) > now and '!' .. till or ''
-- a token that is ahead of the clock is kept until the clock has caught up
local keep = string.format('%.0f', ARGV[2] + math.ceil((token - now) / 1000))
redis.call('SET', KEYS[1], text .. marks, 'PX', keep)
local wanted = string.sub(held, -1) == '!' and '!' or ''
redis.call('SET', KEYS[2], ARGV[1] .. ':' .. text .. wanted, 'KEEPTTL')
return text
